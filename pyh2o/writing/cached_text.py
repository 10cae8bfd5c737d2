"""A text whose first tokens are in a model's cache; the last ones may not be evaluated yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import TYPE_CHECKING

from ..cache.kv_cache import IntArray
from ..core.prefixes import MIN_SAVED, cannot_go_back, restore, take_snapshot
from ..core.text import HasText, Text, text_of
from ..core.tokens import n_common

if TYPE_CHECKING:
    from .writer import Writer

# Number of last cached tokens that are compared to recognise the text.
SEEN_TOKENS = 16

# Tokens of a text: (start, end), end not included.
Span = tuple[int, int]

# The cached text that uses a model's text: the one that was started, loaded or read last.
_owners: weakref.WeakKeyDictionary[Text, weakref.ref[CachedText]] = weakref.WeakKeyDictionary()


class CachedText:
    """The tokens of a text, with as many of the first ones as possible in a model's cache.

    Attributes:
        llm: the text of the model.
        tokens: the tokens; append new ones here, and use the methods for other changes.
        pins: pinned spans other than the first tokens; ascending, not adjacent.
        dropped: spans to drop from the cache once they are read; ascending, not adjacent.
    """

    def __init__(self, llm: Text | HasText, on_taken: Callable[[], None] | None = None) -> None:
        """Create an empty text; the cache does not change before `begin`.

        Args:
            llm: the model.
            on_taken: method to call before another text uses the model; held weakly.
        """
        self.llm = text_of(llm)
        self.tokens: list[int] = []
        self.pins: tuple[Span, ...] = ()
        self.dropped: tuple[Span, ...] = ()
        self._snapshots = self.llm.model.snapshots
        self._n_pinned: int | None = None
        self._n_cached = 0
        self._on_taken = None if on_taken is None else weakref.WeakMethod(on_taken)

    # ---------------------------------------------------------------------------------------------
    # Use of the model
    # ---------------------------------------------------------------------------------------------

    def is_there(self) -> bool:
        """Return whether this text has the model, and the cache holds its evaluated tokens."""
        return self._has_model() and self.llm.n_tokens == self._n_cached and self._is_as_in_cache()

    def _has_model(self) -> bool:
        """Return whether no other text uses the model."""
        return _owners.get(self.llm, lambda: None)() is self

    def _is_as_in_cache(self) -> bool:
        """Return whether the last tokens in the cache are those of this text."""
        end = self.llm.n_tokens
        start = max(0, end - SEEN_TOKENS)
        newest: list[int] = self.llm.record[start:end].tolist()
        return newest == self.tokens[start:end]

    def _take_model(self) -> None:
        """Use the model for this text; its present text calls `on_taken`, and takes a snapshot."""
        owner = _owners.get(self.llm, lambda: None)()
        if owner is not None and owner is not self:
            on_taken = owner._on_taken and owner._on_taken()
            if on_taken:
                on_taken()
            if owner.is_there() and owner.n_to_read(self.llm.tokens) >= MIN_SAVED:
                take_snapshot(self.llm, owner=owner)
        _owners[self.llm] = weakref.ref(self)

    def reclaim(self) -> None:
        """Use the model again, and restore this text from snapshots, if another one is there."""
        if not self.is_there():
            self._take_model()
            self.recover(len(self.tokens) - 1)

    def look(self) -> None:
        """Record the number of cached tokens, which must be tokens of this text."""
        self._n_cached = self.llm.n_tokens

    def _take_snapshot(self, n_new: int | None = None) -> None:
        """Take a snapshot if up to `n_new` tokens may make it necessary, and it saves reading."""
        is_needed = self._snapshots.mib > 0 and cannot_go_back(self.llm.kv, n_new)
        if is_needed and self.n_to_read(self.llm.tokens) >= MIN_SAVED:
            take_snapshot(self.llm, owner=self)

    def n_to_read(self, tokens: Sequence[int] | IntArray) -> int:
        """Return the number of tokens to read after the longest snapshot is restored."""
        found = self._snapshots.prefixes(tokens, self)
        return len(tokens) - (len(found[0].tokens) if found else 0)

    def drop_snapshots(self) -> None:
        """Delete the snapshots of this text."""
        self._snapshots.clear(self)

    # ---------------------------------------------------------------------------------------------
    # The text
    # ---------------------------------------------------------------------------------------------

    @property
    def unread(self) -> list[int]:
        """The tokens to evaluate before the next one can be sampled."""
        return self.tokens[self.llm.n_tokens :]

    def begin(
        self,
        tokens: Sequence[int],
        *,
        n_pinned: int | None = None,
        pins: Sequence[Span] = (),
        dropped: Sequence[Span] = (),
    ) -> None:
        """Replace the text, and empty the cache.

        Args:
            tokens: the new text.
            n_pinned: number of first tokens to pin; None for the present or configured number.
            pins, dropped: see the attributes.
        """
        self._take_model()
        self.tokens, self.pins, self.dropped = list(tokens), tuple(pins), tuple(dropped)
        self._n_pinned = self._n_pinned if n_pinned is None else n_pinned
        self.drop_snapshots()
        self.recover(0)

    def recover(self, n_tokens: int) -> None:
        """Restore the longest prefix of the first `n_tokens` tokens from snapshots."""
        try:
            if not restore(self.llm, self.tokens[:n_tokens], owner=self):
                self.llm.reset()
        finally:
            # an earlier snapshot may have other pins
            with self.llm.lock:
                if self._n_pinned is not None:
                    self.llm.cache.pin(self._n_pinned)
                self.llm.cache.pin_spans(self.pins)
            self._drop_read_spans()
            self.look()

    @property
    def n_pinned(self) -> int:
        """Number of pinned first tokens."""
        budget = self.llm.model.budget
        by_settings = 0 if budget is None else budget.pinned
        return by_settings if self._n_pinned is None else self._n_pinned

    def pin(self, pins: Sequence[Span]) -> None:
        """Replace the pinned spans.

        Raises:
            SettingsError: they do not fit the budget.
        """
        if self._has_model():  # otherwise they are pinned when this text returns
            with self.llm.lock:
                self.llm.cache.pin_spans(pins)
        self.pins = tuple(pins)

    def pin_first(self, pins: Sequence[Span], n_tokens: int) -> None:
        """Replace the pinned spans by the parts of `pins` in the first `n_tokens` tokens."""
        left = tuple((start, min(end, n_tokens)) for start, end in pins if start < n_tokens)
        if left != self.pins:
            self.pin(left)

    def load(
        self,
        tokens: Sequence[int],
        cached: Sequence[int],
        kv_state: bytes | mmap,
        pins: Sequence[Span] = (),
        dropped: Sequence[Span] = (),
    ) -> None:
        """Load a text with the state of a cache that has the tokens `cached`.

        If they differ from the text, their common prefix stays in the cache, if it has its rows.

        Raises:
            StateError: the state does not match; the cache is empty.
        """
        self.llm.load_kv_state(kv_state, cached)
        self._take_model()
        self.tokens, self.pins = list(cached), ()
        self.dropped = tuple(self.llm.dropped_spans)
        self.look()
        self.truncate(n_common(tokens, cached))
        self.tokens, self.dropped = list(tokens), tuple(dropped)
        if self._n_pinned is not None:
            with self.llm.lock:
                self.llm.cache.pin(self._n_pinned)
        self.pin(pins)
        self._drop_read_spans()

    def truncate(self, n_tokens: int, *, may_return: bool = False) -> None:
        """Truncate the text to its first `n_tokens` tokens.

        If too many of their rows were evicted, they are restored from a snapshot, and the rest has
        to be read again.

        Args:
            n_tokens: number of tokens to keep.
            may_return: whether to take a snapshot, as `restore` may follow.
        """
        if may_return and self.llm.n_tokens - n_tokens >= MIN_SAVED:
            self._take_snapshot()
        del self.tokens[n_tokens:]
        self.pin_first(self.pins, n_tokens)
        # the end of a dropped span has no rows
        n_there = next((a for a, b in self.dropped if a < n_tokens <= b), n_tokens)
        self.dropped = tuple((a, b) for a, b in self.dropped if b < n_tokens)
        if n_there < self.llm.n_tokens and not (
            n_there and self.has_rows(n_there) and self.llm.remove_tail(n_there)
        ):
            self.recover(n_tokens)
        self.look()

    def restore(
        self,
        start: int,
        tokens: Sequence[int],
        pins: Sequence[Span],
        dropped: Sequence[Span],
    ) -> None:
        """Restore the tokens, pins and dropped spans after the first `start` tokens."""
        self.truncate(start)
        self.tokens += tokens
        self.dropped = tuple(dropped)
        if len(self.unread) - self.n_to_read(self.tokens) >= MIN_SAVED:
            self.recover(len(self.tokens))
        if self.pins != tuple(pins):
            self.pin(pins)

    def has_rows(self, n_tokens: int) -> bool:
        """Return whether the cache has enough rows to continue after the first `n_tokens` tokens.

        Rows that were recent at that point may have been evicted. With half of them, continuing is
        better than reading the whole text again.
        """
        first_needed = max(1, n_tokens - max(1, self.llm.kv.recent // 2))
        for start, end in self.llm.dropped_spans:
            if start < first_needed <= end:
                first_needed = min(end + 1, n_tokens)
        return self.llm.can_remove_tail(first_needed)

    def drop(self, spans: Sequence[Span]) -> None:
        """Drop more spans (see `Text.drop_spans`), at once or when they are read.

        Raises:
            SettingsError: they are pinned.
        """
        dropped = tuple(sorted({*self.dropped, *spans}))
        if dropped != self.dropped:
            self.dropped = dropped
            self._drop_read_spans()

    def _drop_read_spans(self) -> None:
        n_tokens = self.llm.n_tokens
        self.llm.drop_spans([(start, end) for start, end in self.dropped if end < n_tokens])

    def drop_surplus(self) -> None:
        """Remove rows of an evaluation that Ctrl-C aborted before its tokens were recorded."""
        if not self.llm.drop_surplus():
            self.recover(len(self.tokens))

    def write(self, writer: Writer, max_tokens: int | None = None) -> Iterator[int]:
        """Evaluate the unread tokens, then yield the tokens that the writer samples.

        A token that becomes a part of the text has to be in `tokens` before the next one is
        requested. There are at most `max_tokens` of them, unless that is None.
        """
        with self.sampling(max_tokens):
            for token in writer.write(self.unread):
                self.look()
                yield token

    @contextmanager
    def sampling(self, max_tokens: int | None = None) -> Iterator[None]:
        """Prepare to read the unread tokens and to sample after them, during the context.

        Snapshots are taken if the rows of the present text may be evicted. Dropped spans of a text
        that is read again are read and dropped.

        Args:
            max_tokens: maximum number of tokens to sample; None for no limit.
        """
        llm = self.llm
        for start, end in self.dropped:
            if llm.n_tokens <= end < len(self.tokens):
                llm.read(self.tokens[llm.n_tokens : end + 1])
                llm.drop_spans([(start, end)])
        n_unread = len(self.unread)
        n_new = None if max_tokens is None else n_unread + max_tokens
        self._take_snapshot(n_new)
        # All but the end of a short message is read as fast as a snapshot is taken.
        is_slow = n_unread > MIN_SAVED and llm.model.settings.prefill != "exact"
        if is_slow and cannot_go_back(llm.kv, n_new):
            end = max(llm.n_tokens, len(self.tokens) - llm.model.min_chunk)
            llm.pauses[end] = self._take_snapshot
        try:
            yield
        finally:
            llm.pauses.clear()
            if llm.n_tokens and self._is_as_in_cache():
                self.look()

    @property
    def kept(self) -> list[int]:
        """The tokens without dropped spans."""
        ends = [0, *(end for _, end in self.dropped)]
        starts = [*(start for start, _ in self.dropped), len(self.tokens)]
        return [t for a, b in zip(ends, starts, strict=True) for t in self.tokens[a:b]]
