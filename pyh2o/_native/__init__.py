"""The C interface of native/include/llama-h2o.h, as it is. Friendlier layers stand above it.

Importing it raises LibraryError if the library cannot be loaded.
"""

from __future__ import annotations

from ..errors import LibraryError
from ..library import LIBRARY_FOLDER, check_library
from ..library.loading import load_backends, open_ggml

check_library()
# in a checkout the compiled module is that of the installed package
__path__ = [*__path__, str(LIBRARY_FOLDER.parent / "_native")]


def how_to_load(reason: str) -> str:
    """What to do about a library that the dynamic linker says is missing or does not fit."""
    if reason.startswith(("libcublas", "libcudart")):
        return (
            "install CUDA's libraries (pip install nvidia-cublas nvidia-cuda-runtime, of CUDA 13) "
            "or the toolkit that pyh2o was built with"
        )
    return "install pyh2o again, on this machine"


try:
    from ._ffi import ffi, lib
except ImportError as error:
    raise LibraryError(
        f"pyh2o's library cannot be loaded: {error}; {how_to_load(str(error))}"
    ) from error
load_backends(open_ggml(LIBRARY_FOLDER), LIBRARY_FOLDER)

__all__ = ["ffi", "lib"]
