"""A text whose beginning is in a model's cache, and whose end is still to be evaluated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from typing import TYPE_CHECKING

from ..cache.kv_cache import IntArray
from ..core.prefixes import MIN_SAVED, cannot_go_back, restore, take_snapshot
from ..core.text import HasText, Text, text_of
from ..core.tokens import n_common

if TYPE_CHECKING:
    from .writer import Writer

# Tokens at the end of the cached text by which it is recognised.
SEEN_TOKENS = 16

# Tokens of a text: (start, end), end not included.
Span = tuple[int, int]

# A model has one text: the one that was begun, loaded or read last.
_owners: weakref.WeakKeyDictionary[Text, weakref.ref[CachedText]] = weakref.WeakKeyDictionary()


class CachedText:
    """The tokens of a text, as many of the first as possible in the cache of a model.

    Attributes:
        llm: the model.
        tokens: of the text. They may grow here; to shorten or to replace them has methods.
        pins: spans that are never evicted, beside the first tokens; ascending and apart.
        forgotten: spans that it does without once they are read; likewise.
    """

    def __init__(self, llm: Text | HasText, on_taken: Callable[[], None] | None = None) -> None:
        """An empty text; the cache is not touched before `begin`.

        Args:
            llm: the model.
            on_taken: called before another text takes the model. A method is held weakly.
        """
        self.llm = text_of(llm)
        self.tokens: list[int] = []
        self.pins: tuple[Span, ...] = ()
        self.forgotten: tuple[Span, ...] = ()
        self._snapshots = self.llm.model.snapshots
        self._n_pinned: int | None = None
        self._n_cached = 0
        self._on_taken = None if on_taken is None else weakref.WeakMethod(on_taken)

    # ---------------------------------------------------------------------------------------------
    # Whose the cache is
    # ---------------------------------------------------------------------------------------------

    def is_there(self) -> bool:
        """Whether this text has the model, and the cache holds what it has evaluated last."""
        return self._has_model() and self.llm.n_tokens == self._n_cached and self._is_as_in_cache()

    def _has_model(self) -> bool:
        """Whether no other text has taken the model since."""
        return _owners.get(self.llm, lambda: None)() is self

    def _is_as_in_cache(self) -> bool:
        """Whether the newest tokens in the cache are those of this text."""
        end = self.llm.n_tokens
        start = max(0, end - SEEN_TOKENS)
        newest: list[int] = self.llm.record[start:end].tolist()
        return newest == self.tokens[start:end]

    def _take_model(self) -> None:
        """Make the model this text's, after its text so far was told so."""
        owner = _owners.get(self.llm, lambda: None)()
        if owner is not None and owner is not self and owner._on_taken is not None:
            on_taken = owner._on_taken()
            if on_taken is not None:
                on_taken()
        _owners[self.llm] = weakref.ref(self)

    def reclaim(self) -> None:
        """Have the model again, and what snapshots have of this text, if another one is there."""
        if not self.is_there():
            self._take_model()
            self.recover(len(self.tokens) - 1)

    def look(self) -> None:
        """Remember what is in the cache, when that is a part of this text."""
        self._n_cached = self.llm.n_tokens

    def _take_snapshot(self, n_new: int | None = None) -> None:
        """Take a snapshot if up to `n_new` tokens may make it necessary, and it saves reading."""
        is_needed = self._snapshots.mib > 0 and cannot_go_back(self.llm.kv, n_new)
        if is_needed and self.n_to_read(self.llm.tokens) >= MIN_SAVED:
            take_snapshot(self.llm, owner=self)

    def n_to_read(self, tokens: Sequence[int] | IntArray) -> int:
        """Return how many tokens of a text the best snapshot leaves to read."""
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
        """The tokens to evaluate before the next one can be drawn."""
        return self.tokens[self.llm.n_tokens :]

    def begin(
        self,
        tokens: Sequence[int],
        *,
        n_pinned: int | None = None,
        pins: Sequence[Span] = (),
        forgotten: Sequence[Span] = (),
    ) -> None:
        """Empty the cache; this text, all of it to be evaluated, takes its place.

        Args:
            tokens: of the text.
            n_pinned: first tokens that are never evicted; None for what it was, or the settings'.
            pins: spans that are never evicted either.
            forgotten: spans that are forgotten once they are read.
        """
        self._take_model()
        self.tokens, self.pins, self.forgotten = list(tokens), tuple(pins), tuple(forgotten)
        self._n_pinned = self._n_pinned if n_pinned is None else n_pinned
        self.drop_snapshots()
        self.recover(0)

    def recover(self, n_tokens: int) -> None:
        """Have as many of the first so many tokens in the cache as snapshots have.

        The others are to be evaluated again.
        """
        is_there = False
        try:
            found = self._snapshots.prefixes(self.tokens[:n_tokens], self)
            is_there = any(restore(self.llm, each) for each in found)
        finally:
            if not is_there:
                self.llm.reset()
            # A snapshot from before may have other pins.
            with self.llm.lock:
                if self._n_pinned is not None:
                    self.llm.cache.pin(self._n_pinned)
                self.llm.cache.pin_spans(self.pins)
            self._forget_what_is_read()
            self.look()

    @property
    def n_pinned(self) -> int:
        """First tokens that are never evicted."""
        budget = self.llm.model.budget
        by_settings = 0 if budget is None else budget.pinned
        return by_settings if self._n_pinned is None else self._n_pinned

    def pin(self, pins: Sequence[Span]) -> None:
        """Never evict these spans from now on, in the place of those before.

        Raises:
            SettingsError: as `Llama.pin_spans` does.
        """
        if self._has_model():  # or else the cache is told when this text comes back
            with self.llm.lock:
                self.llm.cache.pin_spans(pins)
        self.pins = tuple(pins)

    def pin_first(self, pins: Sequence[Span], n_tokens: int) -> None:
        """Pin what of these spans is in the first `n_tokens`, in the place of all others."""
        left = tuple((start, min(end, n_tokens)) for start, end in pins if start < n_tokens)
        if left != self.pins:
            self.pin(left)

    def load(
        self,
        tokens: Sequence[int],
        cached: Sequence[int],
        kv_state: bytes | mmap,
        pins: Sequence[Span] = (),
        forgotten: Sequence[Span] = (),
    ) -> None:
        """Load a text with the state of a cache that has the tokens `cached`.

        If they differ from the text, their common prefix stays in the cache, if it has its rows.

        Raises:
            StateError: the state does not fit; the cache is empty.
        """
        self.llm.load_kv_state(kv_state, cached)
        self._take_model()
        self.tokens, self.pins = list(cached), ()
        self.forgotten = tuple(self.llm.dropped_spans)
        self.look()
        self.truncate(n_common(tokens, cached))
        self.tokens, self.forgotten = list(tokens), tuple(forgotten)
        if self._n_pinned is not None:
            with self.llm.lock:
                self.llm.cache.pin(self._n_pinned)
        self.pin(pins)
        self._forget_what_is_read()

    def truncate(self, n_tokens: int, *, may_return: bool = False) -> None:
        """Shorten the text to its first tokens.

        If too many of their rows were evicted, they return from a snapshot; the rest is read again.

        Args:
            n_tokens: that stay.
            may_return: whether `restore` may be called next, for which a snapshot is taken.
        """
        if may_return and self.llm.n_tokens - n_tokens >= MIN_SAVED:
            self._take_snapshot()
        del self.tokens[n_tokens:]
        self.pin_first(self.pins, n_tokens)
        # of what ends amid a gap, what came before that is there
        n_there = next((a for a, b in self.forgotten if a < n_tokens <= b), n_tokens)
        self.forgotten = tuple((a, b) for a, b in self.forgotten if b < n_tokens)
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
        forgotten: Sequence[Span],
    ) -> None:
        """Give the text the end again that it had behind its first `start` tokens."""
        self.truncate(start)
        self.tokens += tokens
        self.forgotten = tuple(forgotten)
        if len(self.unread) - self.n_to_read(self.tokens) >= MIN_SAVED:
            self.recover(len(self.tokens))
        if self.pins != tuple(pins):
            self.pin(pins)

    def has_rows(self, n_tokens: int) -> bool:
        """Whether a shorter text has enough rows in the cache to go on with it.

        Rows that were recent when it ended may be evicted by now. As long as half of the recent
        ones are left, that is better than to read all of the text again.
        """
        first_needed = max(1, n_tokens - max(1, self.llm.kv.recent // 2))
        for start, end in self.llm.dropped_spans:
            if start < first_needed <= end:
                first_needed = min(end + 1, n_tokens)
        return self.llm.can_remove_tail(first_needed)

    def forget(self, spans: Sequence[Span]) -> None:
        """Do without these spans, too, from now on (see `Text.drop_spans`), or once they are read.

        Raises:
            SettingsError: they are pinned.
        """
        forgotten = tuple(sorted({*self.forgotten, *spans}))
        if forgotten != self.forgotten:
            self.forgotten = forgotten
            self._forget_what_is_read()

    def _forget_what_is_read(self) -> None:
        n_tokens = self.llm.n_tokens
        self.llm.drop_spans([(start, end) for start, end in self.forgotten if end < n_tokens])

    def drop_surplus(self) -> None:
        """Drop rows of an evaluation that Ctrl-C broke off before its tokens were recorded."""
        if not self.llm.drop_surplus():
            self.recover(len(self.tokens))

    def write(self, writer: Writer, max_tokens: int | None = None) -> Iterator[int]:
        """Evaluate what is unread, then give the tokens that the writer draws.

        A token that becomes a part of the text has to be in `tokens` before the next one is asked
        for. There are `max_tokens` of them at most, if that is not None.
        """
        for start, end in self.forgotten:  # that are read again
            if self.llm.n_tokens <= end < len(self.tokens):
                self.llm.read(self.tokens[self.llm.n_tokens : end + 1])
                self.llm.drop_spans([(start, end)])
        n_unread = len(self.unread)
        n_new = None if max_tokens is None else n_unread + max_tokens
        self._take_snapshot(n_new)
        # All but the end of a short message is read as fast as a snapshot is taken.
        if n_unread > MIN_SAVED and cannot_go_back(self.llm.kv, n_new):
            writer.before_end = self._take_snapshot
        try:
            for token in writer.write(self.unread):
                self.look()
                yield token
        finally:
            if self.llm.n_tokens and self._is_as_in_cache():
                self.look()
