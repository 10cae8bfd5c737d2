"""A copy of what a cache holds, to be read while its text continues."""

from __future__ import annotations

from dataclasses import dataclass

from .kv_cache import FloatArray, IntArray
from .statistics import KVStatistics


@dataclass
class WatchedCache:
    """A copy of a cache's contents between two batches.

    Attributes:
        rows: positions and scores of each layer (see `Llama.kv_rows`); [] for a full cache.
        recalled: spans (start, end) of evicted tokens that were attended to, end not included.
    """

    evicting: bool
    n_layer: int
    n_tokens: int
    kv: KVStatistics
    rows: list[tuple[IntArray, FloatArray]]
    recalled: tuple[tuple[int, int], ...]

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Return positions and scores of a layer (see `Llama.kv_rows`)."""
        return self.rows[layer]
