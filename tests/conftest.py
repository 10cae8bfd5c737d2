"""Fixtures for all tests."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pyh2o  # noqa: F401  # before any test imports llama_cpp, which then runs on its library
from cli_fakes import ctrl_c_reaches_us, own_state


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers; the seed is printed, and PYH2O_TEST_SEED repeats it."""
    seed = int(os.environ.get("PYH2O_TEST_SEED") or random.randrange(2**32))
    print(f"PYH2O_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For the tests of the command line: a user with nothing but tmp_path, whose Ctrl-C works."""
    own_state(tmp_path, monkeypatch)
    with ctrl_c_reaches_us():
        yield
