"""C++ of this project as a library of its own, made by the compiler of the system."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
CACHE = ROOT / "build" / "tests"

FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-unknown-pragmas"),
    "-U_FORTIFY_SOURCE",  # which takes jumps between stacks for errors
)
# A library calls its own functions, such as an operator new, whatever else is in the process.
OWN_FIRST = () if sys.platform == "darwin" else ("-Wl,-Bsymbolic",)


def compile_library(
    name: str,
    sources: Iterable[Path],
    includes: Iterable[Path] = (),
    libraries: Iterable[Path] = (),
    others: Iterable[Path] = (),
) -> ctypes.CDLL:
    """Compile sources that may include the headers of native/; all warnings are errors.

    CXX and CXXFLAGS of the environment are the compiler and more flags. The libraries are those
    that the sources call, as files; others are folders of llama.cpp's headers, which may warn.
    Where nothing has changed since the last time, the library is there already.
    """
    folders = [*includes, NATIVE / "src", NATIVE / "include"]
    sources = [*sources]
    flags = os.environ.get("CXXFLAGS", "").split()
    warnings = ("-Werror", *(f"-isystem{folder}" for folder in others))
    compiler = (os.environ.get("CXX", "c++"), *FLAGS, *flags, *warnings)
    linked = [text for file in libraries for text in (str(file), f"-Wl,-rpath,{file.parent}")]
    headers = [file for folder in folders for file in sorted(folder.rglob("*.*h"))]
    texts = [
        " ".join([*compiler, *OWN_FIRST, *linked]).encode(),
        *(file.read_bytes() for file in [*sources, *headers]),
    ]
    key = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    library = CACHE / f"{name}-{key}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            unfinished = Path(folder) / library.name
            arguments = (*(f"-I{folder}" for folder in folders), *map(str, sources))
            command = [*compiler, "-shared", *OWN_FIRST, *arguments, *linked, "-o", str(unfinished)]
            # what is loaded into the tests, a sanitizer, is not for the compiler
            environment = {**os.environ, "LD_PRELOAD": ""}
            subprocess.run(command, env=environment, check=True)
            unfinished.replace(library)
    return ctypes.CDLL(str(library))


def ggml_header() -> Path:
    """A folder with a ggml.h that declares what the parts use of it.

    It is written here: no file of the name of one of llama.cpp's is kept beside our own.
    """
    folder = CACHE / "include"
    folder.mkdir(parents=True, exist_ok=True)
    declared = (ROOT / "tests" / "native" / "parts" / "used-of-ggml.h").read_text()
    header = folder / "ggml.h"
    if not header.exists() or header.read_text() != declared:
        unfinished = folder / f"ggml.h.{os.getpid()}"
        unfinished.write_text(declared)
        unfinished.replace(header)
    return folder


def pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    # which keeps the array alive
    return ctypes.c_void_p() if array is None else array.ctypes.data_as(ctypes.c_void_p)


def sizes_of(*sizes: int) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(sizes))(*sizes)


def int32s(values: Iterable[Any]) -> npt.NDArray[np.int32]:
    """Any numbers, nested as they are, in C's order."""
    return np.ascontiguousarray(list(values), dtype=np.int32)
