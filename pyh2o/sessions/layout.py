"""The token layout of a conversation: turns in a chat template, and pinned spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..core.text import Text
from ..core.tokens import n_common
from ..errors import SettingsError
from ..writing.cached_text import Span
from .chat_template import ChatTemplate, Frames, fit
from .turns import Turn

# Spans as in a session's header.
Pins = tuple[Span, ...]


@dataclass(frozen=True)
class RowShares:
    """How rows that are not recent are divided (see Conversation).

    Attributes:
        pin_system: whether the system prompt is pinned.
        fair_turns: whether each turn gets its share of the heavy rows.
    """

    pin_system: bool
    fair_turns: bool

    def n_pinned(self, llm: Text, template: ChatTemplate) -> int:
        """Return the number of first tokens to pin: those before the first message, if they fit.

        Raises:
            SettingsError: a given system prompt, or the tools, do not fit the budget.
        """
        budget, n_opening = llm.model.budget, len(template.opening)
        if budget is None:
            return 0
        room = budget.pinned + budget.heavy
        if self.pin_system and n_opening <= room:
            return max(n_opening, budget.pinned)
        if not self.pin_system or (template.system is None and not template.tools):
            return budget.pinned
        what, cure = "the system prompt takes", "shorten it"
        if template.tools:
            what, cure = f"the system prompt and {len(template.tools)} tools take", "give fewer"
        raise SettingsError(
            f"{what} {n_opening} tokens, more than the {room} rows that are not recent: {cure}, or "
            "raise hh (--hh)"
        )


@dataclass(frozen=True)
class Layout:
    """The tokens of a conversation.

    Attributes:
        turns: the turns, with their positions in `tokens`.
        n_pinned: number of first tokens that are pinned.
        pins: other pinned spans.
    """

    tokens: list[int]
    turns: tuple[Turn, ...]
    n_pinned: int
    pins: Pins


def lay_out(
    llm: Text,
    template: ChatTemplate,
    places: RowShares,
    turns: Sequence[Turn],
    text: Sequence[int] = (),
    pins: Pins = (),
    *,
    frames: Frames | None = None,
    n_same: int = 0,
) -> Layout:
    """Render turns with a template.

    Args:
        llm, template, places: as in the conversation.
        turns: messages and answers.
        text: the current tokens, to which the positions of the turns refer; without them, answers
            are tokenized.
        pins: pinned spans of `text`.
        frames: a prompt that contains these turns, if the template writes some of them in another
            way than in their own prompts.
        n_same: number of first turns that keep their tokens of `text`.

    Raises:
        SettingsError: the pinned tokens do not fit the budget.
        PyH2OError: the template rejects a message.
    """
    n_pinned = places.n_pinned(llm, template)
    placed = list(turns[:n_same])
    tokens = list(text[: placed[-1].end] if placed else template.opening)
    for n, turn in enumerate(turns[n_same:], n_same):
        before = template.shortened(placed)
        own = template.frames([*before, turn.unanswered])
        written, at = own, -1
        if frames is not None and not fit(own.gaps[-1], frames.gaps[n]):
            written, at = frames, n
        if placed:
            start = len(tokens)
            tokens += template.lead(written, tokens[placed[-1].answer_start :], at)
        else:
            # The first message may merge with the end of the opening into one token.
            tokens = template.lead(written, n=at)
            start = n_common(tokens[:-1], template.opening)
        answer = text[turn.answer_start : turn.end]
        turn = replace(turn, start=start, answer_start=len(tokens))
        if not answer:
            turn, answer = template.answer([*before, turn], own, tokens[-1])
        tokens += answer
        placed.append(replace(turn, end=len(tokens)))
    pins = _moved(pins, turns, placed)
    check_pins(llm, n_pinned, pins)
    return Layout(tokens, tuple(placed), n_pinned, pins)


def _moved(spans: Iterable[Span], before: Sequence[Turn], after: Sequence[Turn]) -> Pins:
    """Return the spans at their positions in the new turns."""
    found: list[Span] = []
    for a, b in spans:
        for old, new in zip(before, after, strict=True):
            # the distance between message and answer is the same in all templates
            by = new.answer_start - old.answer_start
            start, end = max(a, old.start) + by, min(b, old.end) + by
            found.append((max(start, new.start), min(end, new.end)))
    return merged((start, end) for start, end in found if start < end)


def merged(spans: Iterable[Span]) -> Pins:
    """Sort spans, and merge adjacent ones."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return tuple(found)


def without(spans: Iterable[Span], start: int, end: int) -> Pins:
    """Remove tokens from `start` to `end` from spans."""
    parts = [part for a, b in spans for part in ((a, min(b, start)), (max(a, end), b))]
    return tuple((a, b) for a, b in parts if a < b)


def check_pins(llm: Text, n_pinned: int, spans: Iterable[Span]) -> None:
    """Check that the first `n_pinned` tokens and the pinned spans fit the budget.

    Raises:
        SettingsError: they do not.
    """
    budget = llm.model.budget
    n_tokens = n_pinned + sum(max(0, end - max(start, n_pinned)) for start, end in spans)
    if budget is not None and n_tokens > budget.pinned + budget.heavy:
        raise SettingsError(
            f"{n_tokens} tokens to pin do not fit the {budget.pinned + budget.heavy} rows that are "
            "not recent: pin fewer, or raise hh (--hh)"
        )
