"""What a process does with memory that it has freed."""

from __future__ import annotations

import ctypes
import os

import pytest

from pyh2o.system.memory import give_back_freed_memory, resident_bytes

# The little ones are too large for lists of pieces that threads keep.
N_PIECES, SIZE, LITTLE = 600, 64 << 10, 2048


@pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another malloc than that of glibc"
)
def test_what_is_freed_between_others_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces, others = [], []
    for _ in range(N_PIECES):
        pieces.append(libc.malloc(SIZE))
        others.append(libc.malloc(LITTLE))
        ctypes.memset(pieces[-1], 1, SIZE)
    for piece in pieces:
        libc.free(piece)
    before = resident_bytes()
    give_back_freed_memory()
    assert resident_bytes() < before - N_PIECES * SIZE // 2
    for other in others:
        libc.free(other)
