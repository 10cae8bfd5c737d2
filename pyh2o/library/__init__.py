"""Finding pyh2o's compiled libraries, and making llama_cpp load them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ..errors import LibraryError

_PACKAGE = Path(__file__).parent.parent

try:
    __version__ = version("pyh2o-llm")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"

GPU_BACKENDS = ("cuda", "metal", "vulkan", "hip", "sycl")
"""ggml's backends for GPUs, by their names in `build_info`."""

# Modules of llama_cpp that load a library, and the environment variables with its path.
_LOADER_OF_LLAMA_CPP = "llama_cpp.llama_cpp"
_PATH_VARIABLES = {_LOADER_OF_LLAMA_CPP: "LLAMA_CPP_LIB_PATH", "llama_cpp.mtmd_cpp": "MTMD_CPP_LIB"}


def package_folders(package: Path = _PACKAGE, search: Iterable[str] | None = None) -> list[str]:
    """Return the folders of the package `pyh2o`.

    Python finds the `pyh2o` of a checkout that it is started in first. It has no libraries, so
    those of the installed package are used, with the command line of the checkout.

    Args:
        search: folders with packages; None for `sys.path`.
    """
    folders = [str(package)]
    if not (package / "lib").exists():
        installed = (Path(folder) / package.name for folder in search or sys.path)
        found = next((each for each in installed if (each / "lib").exists()), None)
        # pyh2o.cli is cli/ at the top of the checkout
        folders += [str(package.parent), str(found)] if found else []
    return folders


LIBRARY_FOLDER = Path(package_folders()[-1]) / "lib"


class _OwnLibrary(MetaPathFinder):
    """Makes llama_cpp load pyh2o's library when it is imported.

    The environment is changed during the import only, so child processes keep their own llama.cpp.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader that sets the variable."""
        variable = _PATH_VARIABLES.get(name)
        if variable is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                # reports missing libraries in one line
                from .. import _native  # noqa: F401

                previous = os.environ.get(variable)
                os.environ[variable] = str(LIBRARY_FOLDER)
                try:
                    run(module)
                finally:
                    if previous is None:
                        del os.environ[variable]
                    else:
                        os.environ[variable] = previous

            loader.exec_module = exec_module
        return spec


def lend_to_llama_cpp() -> None:
    """Make later imports of llama_cpp load pyh2o's library."""
    if not any(isinstance(finder, _OwnLibrary) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnLibrary())


def check_library() -> None:
    """Check that llama_cpp runs on pyh2o's library."""
    if not LIBRARY_FOLDER.exists():
        raise LibraryError(
            f"{_PACKAGE} is the source of pyh2o and has no compiled library: run `make build` "
            "there and start .venv/bin/python, or start Python in another folder"
        )
    library = getattr(sys.modules.get(_LOADER_OF_LLAMA_CPP), "_lib", None)
    if library is not None and Path(library._name).resolve().parent != LIBRARY_FOLDER.resolve():
        raise LibraryError(
            "llama_cpp was imported before pyh2o and runs on its own llama.cpp library, which "
            "cannot evict: import pyh2o first (`import pyh2o` above `import llama_cpp`)"
        )


def build_info() -> dict[str, object]:
    """Return llama.cpp's commit, the hash of the patches and the backends of the library."""
    return cast(dict[str, object], json.loads((LIBRARY_FOLDER / "build.json").read_text()))
