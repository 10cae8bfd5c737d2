"""What keeps a text within a KV cache of fixed size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..errors import ContextLimitError, NativeError, SettingsError
from .kv_cache import (
    ERR_ARCHIVE_TYPE,
    ERR_PIN,
    ERR_RECALL_HEADS,
    FloatArray,
    IntArray,
    KVCache,
    WeightArray,
)
from .settings import Budget, EvictionSettings, whole_blocks
from .statistics import KVStatistics, statistics_of

# Told before an exact prefill takes so much memory: tokens to read, bytes.
OnExactPrefill = Callable[[int, int], None]


class Eviction:
    """A cache that evicts down to a budget (see `TextCache`).

    Args:
        kv: of a text of a context that `attach` was called for.
        budget: what it returned.
        on_exact_prefill: called before an exact prefill takes its memory.
    """

    def __init__(self, kv: KVCache, budget: Budget, on_exact_prefill: OnExactPrefill) -> None:
        self.settings = budget.settings
        self.budget = budget
        self.position_limit = kv.counters().pos_limit
        self._kv = kv
        self._on_exact_prefill = on_exact_prefill
        self._enlarged = False
        self._makes_room = False  # the larger cache is needed now

    # ---------------------------------------------------------------------------------------------
    # What is there
    # ---------------------------------------------------------------------------------------------

    def statistics(self, n_tokens: int) -> KVStatistics:
        return statistics_of(self._kv.counters(), self.budget, n_tokens, self.position_limit)

    def device_bytes(self) -> int:
        return self._kv.device_bytes()

    def rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        return self._kv.rows(layer)

    # ---------------------------------------------------------------------------------------------
    # What stays
    # ---------------------------------------------------------------------------------------------

    def pin(self, n_tokens: int) -> None:
        if isinstance(n_tokens, bool) or not isinstance(n_tokens, int) or n_tokens < 0:
            raise SettingsError(f"{n_tokens!r} tokens to pin: give a count of 0 or more")
        with self._refusing(f"{n_tokens} tokens to pin"):
            self._kv.pin(n_tokens)

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        n_tokens = sum(max(0, end - start) for start, end in spans)
        with self._refusing(f"spans of {n_tokens} tokens to pin"):
            self._kv.pin_spans(spans)

    def zero_rows(self) -> None:
        self._kv.zero_rows()

    def share_fairly(self, starts: Sequence[int]) -> None:
        with self._refusing("starts of parts of the text"):
            self._kv.share_fairly(starts)

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Say what the native library refuses, and what would help."""
        try:
            yield
        except NativeError as error:
            if error.code != ERR_PIN:
                raise SettingsError(f"{what}: {error}") from error
            room = self.budget.rows - self.budget.recent
            raise SettingsError(
                f"{what} do not fit the {room} rows that are not recent: raise hh (--hh), or pin "
                "fewer"
            ) from error

    # ---------------------------------------------------------------------------------------------
    # Going on
    # ---------------------------------------------------------------------------------------------

    def check_positions(self, n_tokens: int) -> None:
        if n_tokens > self.position_limit:
            raise ContextLimitError(
                f"{n_tokens} tokens need more than the {self.position_limit} positions this model "
                "can use: shorten the text, or use a model with a longer context"
            )

    def room(self, n_tokens: int, n_batch: int) -> int:
        """Tokens that the next evaluation takes at once; 0 if a compaction comes first.

        Evaluations end where the cache is exactly full, and every `n_batch` tokens from the start
        of the text, or from the last time when it was full. So they are the same, and so are
        compactions, whatever pieces a text is read in.
        """
        n_used = self._kv.counters().n_used
        # before the first compaction every token has a cell
        n_since = n_tokens if n_used == n_tokens else n_used - self.budget.rows
        return min(n_batch - n_since % n_batch, self.budget.capacity - n_used)

    def chunk(self, n_tokens: int, n_left: int, n_batch: int) -> int:
        if min(n_left, n_batch) == 1:
            return 1
        if self._enlarged:
            return min(n_left, n_batch - n_tokens % n_batch)
        room = self.room(n_tokens, n_batch) or min(n_batch, self.budget.slack)
        return min(n_left, room)

    def mark(self) -> None:
        self._kv.mark()

    def going_on(self, n_common: int, n_tokens: int) -> int:
        # Elsewhere than at a mark the removed tokens' attention would stay in the scores.
        return n_tokens if n_common == n_tokens else self._kv.marked(n_common)

    def can_remove_tail(self, n_tokens: int) -> bool:
        return n_tokens >= self._kv.counters().pos_removable

    # ---------------------------------------------------------------------------------------------
    # What was found
    # ---------------------------------------------------------------------------------------------

    def found(self, n_tokens: int) -> WeightArray:
        return self._kv.found(n_tokens) if self.budget.recall else np.zeros(n_tokens)

    def forget_found(self) -> None:
        if self.budget.recall:
            self._kv.forget_found()

    # ---------------------------------------------------------------------------------------------
    # Exact prefill
    # ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def making_room(self, n_new: int) -> Iterator[None]:
        """As many cells as the tokens need, for a while, if the prefill is exact.

        Raises:
            SettingsError: they need more memory than they may take or than there is, or more
                positions than the model was trained on.
        """
        if self._enlarged and not self._makes_room:
            self._shrink()  # which failed before
        if self.settings.prefill == "stream" or n_new == 1 or self._enlarged:
            yield
            return
        n_rows = self._kv.counters().n_used + n_new
        if n_rows <= self.budget.capacity:
            yield
            return
        # a small slack may leave cells unused, but a larger cache has more of them in any case
        n_cells = whole_blocks(max(n_rows, self.budget.cells + 1))
        n_bytes = self._check_exact_prefill(n_new, n_rows, n_cells)
        self._on_exact_prefill(n_new, n_bytes)
        try:
            self._kv.enlarge(n_cells)
        except NativeError as error:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {mib(n_bytes)} MiB, which cannot be "
                f"had: {error}; use prefill='stream' (--prefill stream)"
            ) from error
        self._enlarged = self._makes_room = True
        try:
            yield
        finally:
            self._makes_room = False
            self._shrink()

    def _shrink(self) -> None:
        """Give the larger cache back; if that fails, the text is still in it.

        Raises:
            NativeError: that failed.
        """
        self._kv.shrink()
        self._enlarged = False

    def _check_exact_prefill(self, n_new: int, n_rows: int, n_cells: int) -> int:
        """The bytes of a larger cache, if it may be taken."""
        counters = self._kv.counters()
        n_bytes = (counters.size_k + counters.size_v + counters.size_scores) // counters.n_cells
        n_bytes *= n_cells
        most = self.settings.prefill_mib
        if most is not None and n_bytes > most * 2**20:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {mib(n_bytes)} MiB, more than the "
                f"{most} allowed: raise prefill_mib (--prefill-mib), or use prefill='stream' "
                "(--prefill stream)"
            )
        if n_rows > self.budget.n_pos:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {n_rows} rows, more than the "
                f"{self.budget.n_pos} positions the model was trained on: use prefill='stream' "
                "(--prefill stream)"
            )
        return n_bytes


def attach(kv: KVCache, budget: Budget) -> Budget:
    """Let a context evict.

    Args:
        kv: of a context without text.
        budget: what to keep. Where a head's row is not whole blocks of the archive's usual type,
            the archive is of f16, and where nothing can be found in it there is none by default.

    Returns:
        the budget that it has now.

    Raises:
        SettingsError: the context or its cache type does not allow it.
    """
    try:
        return _attach(kv, budget)
    except NativeError as error:
        raise SettingsError(f"eviction cannot start: {error}") from error


def _attach(kv: KVCache, budget: Budget) -> Budget:
    settings = budget.settings
    try:
        kv.attach(budget)
        return budget
    except NativeError as error:
        if error.code == ERR_ARCHIVE_TYPE and settings.recall_type == EvictionSettings.recall_type:
            budget = replace(budget, settings=replace(settings, recall_type="f16"))
        elif error.code == ERR_RECALL_HEADS and settings.recall is None:
            budget = replace(budget, settings=replace(settings, recall=0), recall=0)
        else:
            raise
    return _attach(kv, budget)


def mib(n_bytes: int) -> int:
    """Rounded up, so that a limit of so many is enough."""
    return -(-n_bytes // 2**20)
