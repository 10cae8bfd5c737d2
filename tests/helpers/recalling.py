"""Tiny models that recall, in the NumPy reference: they round nothing, unless they are asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o.reference import ReferenceLlama

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

EXACT = 1e-9  # what float64 leaves of a difference

# What `write_tiny_gguf` writes.
N_LAYER, N_HEAD, N_HEAD_KV = 3, 4, 2
HEADS = [(layer, head) for layer in range(N_LAYER) for head in range(N_HEAD_KV)]


def random_tokens(rng: np.random.Generator, n_tokens: int) -> IntArray:
    return rng.integers(3, 384, n_tokens)


def as_it_is(rows: FloatArray) -> FloatArray:
    """No rounding."""
    return rows.astype(np.float64)


def recalling(path: Path, **settings: Any) -> ReferenceLlama:
    """A model in float64; settings as of `ReferenceLlama.from_gguf`."""
    settings = {"heavy": 24, "recent": 16, "recall_queries": 16} | settings
    return ReferenceLlama.from_gguf(
        path, dtype=np.float64, cache_dtype=np.float64, archive_rounding=as_it_is, **settings
    )
