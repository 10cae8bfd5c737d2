"""What keeps a text within a KV cache of fixed size, and what stands in for it in a full cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from ..errors import ContextLimitError, NativeError, SettingsError
from .kv_cache import ERR_ARCHIVE_TYPE, ERR_PIN, Counters, FloatArray, IntArray, KVCache
from .settings import Budget, EvictionSettings, whole_blocks
from .statistics import KVStatistics

# Tokens after which a text that goes on asks for other rows of its archive: so many, and at least
# one for so many tokens in the archive.
LEAST_REFRESH = 32
ARCHIVED_PER_REFRESH = 64

# Told before an exact prefill takes so much memory: tokens to read, bytes.
OnExactPrefill = Callable[[int, int], None]


class TextCache(Protocol):
    """How a text lies in the cache: `Eviction`, or its twin `FullCache`, which does nothing.

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

    def recall(self, n_asking: int) -> bool:
        """Recall the rows that the last so many tokens ask for; whether there are any now."""

    def refresh_every(self) -> int:
        """Tokens after which a text that goes on asks anew."""

    def drop_recalled(self) -> None:
        """Drop the rows that were recalled."""

    def recalled(self) -> list[tuple[int, int, float]]:
        """(start, end, weight) of the spans that are recalled now."""


class FullCache:
    """A cache that keeps every row: llama.cpp's own."""

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
            _statistics(counters, limits, n_tokens, window),
            evicting=False,
            bytes_full=counters.size_k + counters.size_v + _bytes_fixed(counters),
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

    def recall(self, n_asking: int) -> bool:
        return False

    def refresh_every(self) -> int:
        return LEAST_REFRESH

    def drop_recalled(self) -> None:
        pass

    def recalled(self) -> list[tuple[int, int, float]]:
        return []


class Eviction:
    """A cache that evicts down to a budget.

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
        return _statistics(self._kv.counters(), self.budget, n_tokens, self.position_limit)

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
    # Recall
    # ---------------------------------------------------------------------------------------------

    def recall(self, n_asking: int) -> bool:
        # while a prompt is read exactly, nothing of it is evicted
        return (
            self.budget.recall > 0
            and not self._enlarged
            and self._kv.recall(self.budget.recall, n_asking) > 0
        )

    def refresh_every(self) -> int:
        # The search takes time in proportion to the archive: so its share of the time stays. Powers
        # of two, since every place that is a multiple of one is one of all smaller ones.
        every, n_archived = LEAST_REFRESH, self._kv.counters().n_archived
        while every * ARCHIVED_PER_REFRESH < n_archived:
            every *= 2
        return every

    def drop_recalled(self) -> None:
        if self.budget.recall > 0:
            self._kv.drop_recalled()

    def recalled(self) -> list[tuple[int, int, float]]:
        return self._kv.recalled() if self.budget.recall > 0 else []

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
            the archive is of f16.

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
    try:
        kv.attach(budget)
    except NativeError as error:
        settings = budget.settings
        usual = settings.recall_type == EvictionSettings.recall_type
        if error.code != ERR_ARCHIVE_TYPE or not usual:
            raise
        budget = replace(budget, settings=replace(settings, recall_type="f16"))
        kv.attach(budget)
    return budget


def _statistics(
    counters: Counters, limits: Budget, n_tokens: int, position_limit: int
) -> KVStatistics:
    bytes_of_a_cell = (counters.size_k + counters.size_v) // counters.n_cells
    return KVStatistics(
        evicting=True,
        limits=limits,
        position=n_tokens,
        position_limit=position_limit,
        cells=counters.n_cells,
        used=counters.n_used,
        pinned=counters.n_pinned,
        compactions=counters.n_compactions,
        tokens_evicted=counters.n_cells_freed,
        rows_evicted=counters.n_rows_evicted,
        rows_moved=counters.n_rows_moved,
        compaction_seconds=counters.t_compactions_us / 1e6,
        rebases=counters.n_rebases,
        rebase_seconds=counters.t_rebases_us / 1e6,
        bytes_k=counters.size_k,
        bytes_v=counters.size_v,
        bytes_scores=counters.size_scores,
        bytes_full=bytes_of_a_cell * whole_blocks(limits.window) + _bytes_fixed(counters),
        bytes_window=counters.size_window,
        bytes_recurrent=counters.size_recurrent,
        recalled=counters.n_recalled,
        archived=counters.n_archived,
        unarchived=counters.n_unarchived,
        bytes_archive=counters.size_archive,
        recalls=counters.n_recalls,
        recall_seconds=counters.t_recalls_us / 1e6,
        archive_seconds=counters.t_archive_us / 1e6,
        hidden_mass=counters.hidden,
        missed_mass=counters.missed,
    )


def _bytes_fixed(counters: Counters) -> int:
    return counters.size_window + counters.size_recurrent


def mib(n_bytes: int) -> int:
    """Rounded up, so that a limit of so many is enough."""
    return -(-n_bytes // 2**20)
