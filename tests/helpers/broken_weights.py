"""A tiny model with infinite attention: damage that no header shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from tiny_gguf import write_tiny_gguf

# A policy that measures attention when rows are selected.
POLICY = "snap"


def infinite_model(path: Path, **settings: Any) -> Path:
    """Write a model with one key that is infinite for every token."""
    return _with_infinity(path, "blk.1.attn_k.weight", 0, **settings)


def model_with_infinite_token(path: Path, token: int, **settings: Any) -> Path:
    """Write a model with one token whose keys are infinite."""
    return _with_infinity(path, "token_embd.weight", token, **settings)


def _with_infinity(path: Path, name: str, row: int, **settings: Any) -> Path:
    write_tiny_gguf(path, seed=1, n_ctx_train=1024, **settings)
    reader = GGUFReader(path, "r+")
    (weights,) = [each for each in reader.tensors if each.name == name]
    weights.data[row, 0] = np.inf
    reader.data.flush()
    return path
