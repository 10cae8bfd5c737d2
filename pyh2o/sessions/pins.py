"""Spans of a text that somebody has pinned: they are never evicted, like the system prompt."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.text import Text
from ..errors import SettingsError
from ..writing.cached_text import Span

# Spans as a session's header has them.
Pins = tuple[Span, ...]


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


def check_room(llm: Text, n_pinned: int, spans: Iterable[Span]) -> None:
    """Refuse spans beside the first `n_pinned` tokens for which there are too few rows.

    Raises:
        SettingsError: there are.
    """
    budget = llm.model.budget
    n_tokens = n_pinned + sum(max(0, end - max(start, n_pinned)) for start, end in spans)
    if budget is not None and n_tokens > budget.pinned + budget.heavy:
        raise SettingsError(
            f"{n_tokens} tokens to pin do not fit the {budget.pinned + budget.heavy} rows that are "
            "not recent: pin fewer, or raise hh (--hh)"
        )
