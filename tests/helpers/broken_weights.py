"""A tiny model whose weights make its attention infinite: damage that no header shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from tiny_gguf import write_tiny_gguf

# A policy that measures attention when rows are chosen.
POLICY = "snap"


def infinite_model(path: Path, **settings: Any) -> Path:
    """A model of which one key is infinite for every token."""
    write_tiny_gguf(path, seed=1, n_ctx_train=1024, **settings)
    reader = GGUFReader(path, "r+")
    (keys,) = [each for each in reader.tensors if each.name == "blk.1.attn_k.weight"]
    keys.data[0, 0] = np.inf
    reader.data.flush()
    return path
