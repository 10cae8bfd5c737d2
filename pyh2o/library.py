"""Makes llama_cpp run on pyh2o's own llama.cpp library, the one that can evict."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import cast

from .errors import LibraryError

LIBRARY_FOLDER = Path(__file__).parent / "lib"

# llama_cpp reads it once, when it is first imported.
_PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"


def use_own_library() -> None:
    """Import llama_cpp on pyh2o's library; call it before any other import of llama_cpp.

    Raises:
        LibraryError: llama_cpp is loaded already, on another library; or this is the source folder,
            which has no compiled library; or a library that ours needs is missing.
    """
    if not LIBRARY_FOLDER.exists():
        raise LibraryError(
            f"{LIBRARY_FOLDER.parent} is the source of pyh2o and has no compiled library: start "
            "Python in another folder, so that it imports the installed package"
        )
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        if Path(loaded._lib._name).resolve().parent != LIBRARY_FOLDER.resolve():
            raise LibraryError(
                "llama_cpp was imported before pyh2o and runs on its own llama.cpp library, which "
                "cannot evict: import pyh2o first (`import pyh2o` above `import llama_cpp`)"
            )
        return

    # Says in one line what the dynamic linker misses; llama_cpp would not.
    from . import _native  # noqa: F401

    previous = os.environ.get(_PATH_VARIABLE)
    os.environ[_PATH_VARIABLE] = str(LIBRARY_FOLDER)
    try:
        import llama_cpp  # noqa: F401
    finally:
        if previous is None:
            del os.environ[_PATH_VARIABLE]
        else:
            os.environ[_PATH_VARIABLE] = previous


def build_info() -> dict[str, object]:
    """What the library was built from: llama.cpp's commit, the patches' hash, the backends."""
    return cast(dict[str, object], json.loads((LIBRARY_FOLDER / "build.json").read_text()))
