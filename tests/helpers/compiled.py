"""Compile C++ of this project as a separate library with the system's compiler."""

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
    "-U_FORTIFY_SOURCE",  # it reports jumps between stacks as errors
)
# A library calls its own functions, such as an operator new, whatever the process contains.
OWN_FIRST = () if sys.platform == "darwin" else ("-Wl,-Bsymbolic",)


def compile_library(
    name: str,
    sources: Iterable[Path],
    includes: Iterable[Path] = (),
    libraries: Iterable[Path] = (),
    others: Iterable[Path] = (),
) -> ctypes.CDLL:
    """Compile sources that may include the headers of native/. All warnings are errors.

    The environment variables CXX and CXXFLAGS set the compiler and additional flags. `libraries`
    are files to link, other folders contain llama.cpp's headers, which may warn. An up-to-date
    library is reused.
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
            # a sanitizer loaded into the tests must not run in the compiler
            environment = {**os.environ, "LD_PRELOAD": ""}
            subprocess.run(command, env=environment, check=True)
            unfinished.replace(library)
    return ctypes.CDLL(str(library))


def ggml_header() -> Path:
    """Return a folder with a ggml.h that declares what the parts use of it.

    It is generated so that no file with a name of llama.cpp's is kept next to ours.
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
    # keeps the array alive
    return ctypes.c_void_p() if array is None else array.ctypes.data_as(ctypes.c_void_p)


def sizes_of(*sizes: int) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(sizes))(*sizes)


def int32s(values: Iterable[Any]) -> npt.NDArray[np.int32]:
    """Return any nested numbers in C order."""
    return np.ascontiguousarray(list(values), dtype=np.int32)
