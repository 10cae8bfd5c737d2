"""Spans of a text that somebody has pinned: they are never evicted, like the system prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import SettingsError
from ..llama import Llama
from ..text.cached_text import CachedText, Span
from .turns import Turn

# Spans as a session's header has them.
Pins = tuple[Span, ...]


class PinnedText:
    """A text in which spans can be pinned; its sessions keep them."""

    _text: CachedText

    @property
    def tokens(self) -> list[int]:
        """Of all of the text, whether they are evaluated yet or not."""
        return self._text.tokens

    @property
    def pins(self) -> Pins:
        """Spans that are pinned beside the first tokens: (start, end), end not included."""
        return self._text.pins

    @property
    def n_pinned(self) -> int:
        """First tokens that are pinned."""
        return self._text.n_pinned

    def pin(self, start: int, end: int) -> None:
        """Never evict these tokens from now on; what was evicted comes back from the archive.

        Raises:
            SettingsError: the text has no such tokens, or there is no room for them.
            PyH2OError: it is a conversation, and the model has another text by now.
        """
        self._settle()
        self._check_span(start, end)
        pins = merged([*self.pins, (start, end)])
        check_room(self._text.llm, self.n_pinned, pins)
        self._text.pin(pins)

    def unpin(self, start: int, end: int) -> None:
        """Let these tokens be evicted again, but for the first ones.

        Raises:
            SettingsError: the text has no such tokens.
            PyH2OError: it is a conversation, and the model has another text by now.
        """
        self._settle()
        self._check_span(start, end)
        self._text.pin(without(self.pins, start, end))

    def _settle(self) -> None:
        """Do what has to be done before a change."""

    def _check_span(self, start: int, end: int) -> None:
        n_tokens = len(self._text.tokens)
        if not 0 <= start < end <= n_tokens:
            raise SettingsError(
                f"there are no tokens from {start} to {end} to pin: the text has {n_tokens}"
            )


def merged(spans: Iterable[Span]) -> Pins:
    """Spans in the order of the text, those that touch as one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return tuple(found)


def without(spans: Iterable[Span], start: int, end: int) -> Pins:
    """What is left of spans without those tokens."""
    parts = [part for a, b in spans for part in ((a, min(b, start)), (max(a, end), b))]
    return tuple((a, b) for a, b in parts if a < b)


def moved(spans: Iterable[Span], before: Sequence[Turn], after: Sequence[Turn]) -> Pins:
    """Spans of a conversation whose template was changed (see `rewritten`)."""
    found: list[Span] = []
    for a, b in spans:
        for old, new in zip(before, after, strict=True):
            # message and answer keep their distance, whatever the template writes before them
            by = new.answer_start - old.answer_start
            start, end = max(a, old.start) + by, min(b, old.end) + by
            found.append((max(start, new.start), min(end, new.end)))
    return merged((start, end) for start, end in found if start < end)


def check_room(llm: Llama, n_pinned: int, spans: Iterable[Span]) -> None:
    """Refuse spans for which there are too few rows.

    Args:
        llm: the model.
        n_pinned: first tokens of the text that are pinned.
        spans: beside them.

    Raises:
        SettingsError: there are.
    """
    budget = llm.budget
    n_tokens = n_pinned + sum(max(0, end - max(start, n_pinned)) for start, end in spans)
    if budget is not None and n_tokens > budget.pinned + budget.heavy:
        raise SettingsError(
            f"{n_tokens} tokens to pin do not fit the {budget.pinned + budget.heavy} rows that are "
            "not recent: pin fewer, or raise hh (--hh)"
        )


def check_pins(pins: Pins) -> None:
    """Refuse what are no spans, in a header that somebody may have edited.

    Raises:
        ValueError: a span has no tokens, or they are not one behind the other.
    """
    if any(len(span) != 2 or span[0] >= span[1] for span in pins) or merged(pins) != pins:
        raise ValueError("its pins are no spans")
