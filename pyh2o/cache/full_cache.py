"""What stands in for eviction where the cache keeps every row: llama.cpp's own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from ..errors import ContextLimitError
from .kv_cache import FloatArray, IntArray, KVCache, WeightArray
from .settings import Budget, EvictionSettings
from .statistics import KVStatistics, bytes_fixed, statistics_of


class FullCache:
    """A cache that keeps every row (see `TextCache`), of a window of so many tokens."""

    def __init__(self, kv: KVCache, settings: EvictionSettings, window: int) -> None:
        self.settings = settings
        self.position_limit = window
        self._kv = kv

    def statistics(self, n_tokens: int) -> KVStatistics:
        counters, window = self._kv.counters(), self.position_limit
        if counters.n_cells == 0:  # of a kind that does not count them
            counters = replace(counters, n_cells=window, n_used=n_tokens)
        unpinned = replace(self.settings, pinned=0)
        limits = Budget(unpinned, window=window, heavy=0, recent=window, slack=0)
        return replace(
            statistics_of(counters, limits, n_tokens, window),
            evicting=False,
            bytes_full=counters.size_k + counters.size_v + bytes_fixed(counters),
        )

    def device_bytes(self) -> int:
        return self._kv.device_bytes()

    def rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        return self._kv.rows(layer)

    def pin(self, n_tokens: int) -> None:
        pass

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        pass

    def share_fairly(self, starts: Sequence[int]) -> None:
        pass

    def zero_rows(self) -> None:
        pass

    def check_positions(self, n_tokens: int) -> None:
        # llama.cpp allocates whole blocks of cells, and would go on in the rest of the last one
        if n_tokens > self.position_limit:
            raise ContextLimitError(
                f"{n_tokens} tokens are more than the window of {self.position_limit}: shorten "
                "the text, raise n_ctx (--ctx), or turn eviction on"
            )

    def making_room(self, n_new: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def room(self, n_tokens: int, n_batch: int) -> int:
        return n_batch

    def chunk(self, n_tokens: int, n_left: int, n_batch: int) -> int:
        return min(n_left, n_batch)

    def mark(self) -> None:
        pass

    def going_on(self, n_common: int, n_tokens: int) -> int:
        return n_tokens  # nothing has to go first: llama_cpp's class removes the rest

    def can_remove_tail(self, n_tokens: int) -> bool:
        return True

    def found(self, n_tokens: int) -> WeightArray:
        return np.zeros(n_tokens)

    def forget_found(self) -> None:
        pass
