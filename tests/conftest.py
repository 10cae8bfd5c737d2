"""Fixtures for all tests."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

import pyh2o.llama  # noqa: F401  # before any test imports llama_cpp, which then runs on its library


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers; the seed is printed, and PYH2O_TEST_SEED repeats it."""
    seed = int(os.environ.get("PYH2O_TEST_SEED") or random.randrange(2**32))
    print(f"PYH2O_TEST_SEED={seed}")
    return np.random.default_rng(seed)
