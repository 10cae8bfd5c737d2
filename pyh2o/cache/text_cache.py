"""What a text asks of the cache that it lies in, whether that evicts or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from .kv_cache import FloatArray, IntArray, WeightArray
from .settings import EvictionSettings
from .statistics import KVStatistics


class TextCache(Protocol):
    """How a text lies in the cache: `Eviction`, or its twin `FullCache`, which evicts nothing.

    Attributes:
        settings: what was asked for.
        position_limit: most tokens of a text.
    """

    settings: EvictionSettings
    position_limit: int

    def statistics(self, n_tokens: int) -> KVStatistics:
        """What the cache holds of a text of so many tokens, and what it costs."""

    def device_bytes(self) -> int:
        """Memory of GPUs (see `Llama.device_bytes`)."""

    def rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Positions and scores of the rows of one layer (see `Llama.kv_rows`)."""

    def pin(self, n_tokens: int) -> None:
        """Never evict the first tokens (see `Llama.pin`)."""

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Never evict these tokens (see `Llama.pin_spans`)."""

    def share_fairly(self, starts: Sequence[int]) -> None:
        """Share the heavy rows out (see `Llama.share_fairly`)."""

    def zero_rows(self) -> None:
        """Set the rows to zero, when the text is gone: some of them were no numbers."""

    def check_positions(self, n_tokens: int) -> None:
        """Refuse a text of so many tokens if there are not so many positions.

        Raises:
            ContextLimitError: there are not.
        """

    def making_room(self, n_new: int) -> AbstractContextManager[None]:
        """As many cells as the tokens need, for a while, if the prefill is exact."""

    def room(self, n_tokens: int, n_batch: int) -> int:
        """Tokens that the next evaluation takes at once; 0 if a compaction comes first.

        Args:
            n_tokens: tokens of the text in the cache.
            n_batch: most tokens at once.
        """

    def chunk(self, n_tokens: int, n_left: int, n_batch: int) -> int:
        """How many tokens to evaluate next.

        Args:
            n_tokens: tokens of the text in the cache.
            n_left: tokens to evaluate, at least one.
            n_batch: most tokens at once.
        """

    def mark(self) -> None:
        """Let the text be set back to here later on as if it had never gone on."""

    def going_on(self, n_common: int, n_tokens: int) -> int:
        """How much of the text can stay when it goes on otherwise, as if it had never gone on.

        Args:
            n_common: so many of the first tokens may stay.
            n_tokens: tokens of the text in the cache.
        """

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Whether all rows of a shorter text are still there."""

    def found(self, n_tokens: int) -> WeightArray:
        """How much tokens looked at each of the first so many since `forget_found`, if evicted."""

    def forget_found(self) -> None:
        """Begin anew to note that."""
