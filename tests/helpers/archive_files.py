"""Archives in files, for tests: written, opened again and looked at."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from archive import N_PAGE, PADDING, Archive, Token, append, assert_holds

SMALL = ((1, 32, 32),)
HEADER = PADDING  # of the file, in bytes
PAGE_HEADER = 560  # bytes with a meaning


def opened(native: ctypes.CDLL, path: Path, max_pages: int = 0) -> Archive:
    size = Archive(native, layers=SMALL).page_bytes()
    archive = Archive(native, layers=SMALL, max_bytes=max_pages * size)
    archive.open_file(path)
    return archive


def written(native: ctypes.CDLL, path: Path, rng: np.random.Generator, n: int) -> dict[int, Token]:
    """A file after so many tokens, and those that are in it."""
    archive, tokens = opened(native, path), dict[int, Token]()
    append(archive, tokens, rng, n)
    archive.close()
    return {p: token for p, token in tokens.items() if p < n // N_PAGE * N_PAGE}


def assert_file_holds(native: ctypes.CDLL, path: Path, tokens: dict[int, Token]) -> None:
    archive = opened(native, path)
    assert_holds(archive, tokens)
    archive.close()
