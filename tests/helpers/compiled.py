"""C++ of this project as a library of its own, made by the compiler of the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NATIVE = Path(__file__).parents[2] / "native"


def compile_library(
    output: Path, sources: Iterable[Path], includes: Iterable[Path] = ()
) -> ctypes.CDLL:
    """Compile sources that may include the headers of native/; all warnings are errors."""
    folders = (*includes, NATIVE / "src", NATIVE / "include")
    subprocess.run(
        [
            *(os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"),
            *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"),
            *(f"-I{folder}" for folder in folders),
            *(str(source) for source in sources),
            *("-o", str(output)),
        ],
        check=True,
    )
    return ctypes.CDLL(str(output))


def pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def sizes_of(*sizes: int) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(sizes))(*sizes)


def int32s(values: Iterable[Any]) -> npt.NDArray[np.int32]:
    """Any numbers, nested as they are, in C's order."""
    return np.ascontiguousarray(list(values), dtype=np.int32)
