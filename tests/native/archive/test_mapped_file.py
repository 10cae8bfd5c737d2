"""The file of an archive while memory runs out."""

from __future__ import annotations

import ctypes
import fcntl
import os
from pathlib import Path

import pytest

from compiled import NATIVE, compile_library


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="sanitizers have an operator new")
def test_file_can_be_opened_again_whichever_allocation_fails(tmp_path: Path) -> None:
    sources = [
        Path(__file__).parents[1] / "parts" / "mapped_file.cpp",
        NATIVE / "src" / "recall" / "h2o-archive-map.cpp",
    ]
    fails = compile_library("mapped_file", sources).mapped_file_fails
    path = tmp_path / "archive"
    path.write_bytes(bytes(1))
    number = 0
    while fails(os.fsencode(path), ctypes.c_int64(number)):
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is still in use
        number += 1
    assert number >= 2  # one for each part that is read as memory
