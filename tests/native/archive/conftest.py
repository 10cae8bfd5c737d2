"""The archive alone, compiled without llama.cpp."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from archive import compile_archive


@pytest.fixture(scope="session")
def native() -> ctypes.CDLL:
    return compile_archive()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"
