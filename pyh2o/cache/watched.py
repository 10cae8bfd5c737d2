"""What the cache of a place holds, for those who watch its text being read and written."""

from __future__ import annotations

from dataclasses import dataclass

from .eviction import TextCache
from .kv_cache import FloatArray, IntArray
from .statistics import KVStatistics


@dataclass
class WatchedCache:
    """A cache between two batches; to be asked while `Place.watched` lasts.

    Attributes:
        evicting, n_layer: of the model.
        n_tokens: of the text that have been evaluated.
    """

    evicting: bool
    n_layer: int
    n_tokens: int
    _cache: TextCache

    @property
    def kv(self) -> KVStatistics:
        """What the cache holds and costs."""
        return self._cache.statistics(self.n_tokens)

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """As `Llama.kv_rows`."""
        return self._cache.rows(layer)

    def recalled(self) -> list[tuple[int, int, float]]:
        """What is recalled now: start, end (not included) and weight."""
        return self._cache.recalled()
