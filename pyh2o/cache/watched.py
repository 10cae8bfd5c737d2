"""What a cache held at one moment, for those who watch a text being read and written."""

from __future__ import annotations

from dataclasses import dataclass

from .kv_cache import FloatArray, IntArray
from .statistics import KVStatistics


@dataclass
class WatchedCache:
    """A cache between two batches: its numbers, and a copy of whose rows it holds.

    Attributes:
        evicting, n_layer: of the model.
        n_tokens: of the text that have been evaluated.
        kv: what the cache holds and costs.
        rows: positions and scores of each layer (see `Llama.kv_rows`); none of a full cache.
        recalled: spans of evicted tokens that were looked at: start and end (not included).
    """

    evicting: bool
    n_layer: int
    n_tokens: int
    kv: KVStatistics
    rows: list[tuple[IntArray, FloatArray]]
    recalled: tuple[tuple[int, int], ...]

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """As `Llama.kv_rows`, of a layer that there is."""
        return self.rows[layer]
