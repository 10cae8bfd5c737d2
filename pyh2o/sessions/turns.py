"""The turns of a conversation, and the answer in progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Annotated

import numpy as np

from ..errors import PyH2OError
from ..writing.answer import Answer
from ..writing.events import Content, Event, Reasoning
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    FINISH_TRAINED_CONTEXT,
)
from ..writing.pieces import ReasoningText
from ..writing.sampling import LARGEST_SEED
from ..writing.tools import Call
from .records import Count

# Maximum number of replaced answers that are kept.
MAX_KEPT = 20

ANSWER_FINISHES = (
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_TRAINED_CONTEXT,
    FINISH_INTERRUPTED,
    FINISH_TOOL_CALLS,
)
Finish = Annotated[str, ANSWER_FINISHES]


@dataclass(frozen=True)
class Step:
    """A part of an answer that ends in tool calls.

    Attributes:
        text: the text without the calls.
        calls: the calls with their results.
        n_tokens: number of tokens of the part and the results, including the template's.
        thoughts: reasoning before the text.
    """

    text: str
    calls: tuple[Call, ...]
    n_tokens: Count
    thoughts: str = ""


@dataclass(frozen=True)
class Turn:
    """A message and its answer, with token positions.

    Attributes:
        user: the message.
        answer: the text of the answer, after the results of tool calls if there are any.
        finish: finish reason: "stop", "length" (`max_tokens`, or a full cache without eviction),
            "repetition" (it only repeated itself), "interrupted", "trained_context" or
            "tool_calls" (it waits for results).
        start: first token of the turn: the end of the previous answer.
        answer_start: first token of the answer or of its first step.
        end: end of the answer; its last token may not be evaluated yet.
        attempt: number of earlier answers to the message.
        told: lore and note before the message (see `lorebooks`).
        steps: earlier parts of the answer, which called tools.
        calls: calls that wait for their results.
        thoughts: reasoning before the answer's text.
    """

    user: str
    answer: str
    finish: Finish
    start: Count
    answer_start: Count
    end: Count
    attempt: Count = 0
    told: str = ""
    steps: tuple[Step, ...] = ()
    calls: tuple[Call, ...] = ()
    thoughts: str = ""

    @property
    def message(self) -> str:
        """The message with lore and note."""
        return f"{self.told}\n\n{self.user}" if self.told else self.user

    @property
    def unanswered(self) -> Turn:
        """The turn without its answer."""
        return replace(self, answer="", end=0, steps=(), calls=(), thoughts="")

    @property
    def part_starts(self) -> list[int]:
        """The first tokens of the steps, and of the part after their results."""
        return [*accumulate((step.n_tokens for step in self.steps), initial=self.answer_start)]


@dataclass(frozen=True)
class KeptAnswer:
    """A replaced answer to the last message.

    Attributes:
        answer, finish, attempt, steps, calls, thoughts: as in a turn.
        tokens: tokens of the answer; [n_tokens], at least one.
    """

    answer: str
    finish: Finish
    attempt: Count
    tokens: tuple[Count, ...]
    steps: tuple[Step, ...] = ()
    calls: tuple[Call, ...] = ()
    thoughts: str = ""

    def in_turn(self, turn: Turn) -> Turn:
        """Return the turn with this answer instead of its own."""
        values = {name: value for name, value in vars(self).items() if name != "tokens"}
        return replace(turn, **values, end=turn.answer_start + len(self.tokens))


@dataclass(frozen=True)
class Dialogue:
    """Messages and answers.

    Attributes:
        turns: all messages that have an answer.
        kept: replaced answers to the last message, in the order of replacement.
    """

    turns: tuple[Turn, ...] = ()
    kept: tuple[KeptAnswer, ...] = ()

    @property
    def last(self) -> Turn:
        """The last turn.

        Raises:
            PyH2OError: there is none.
        """
        if not self.turns:
            raise PyH2OError("there is no message yet: send one")
        return self.turns[-1]

    @property
    def answers(self) -> tuple[Turn, ...]:
        """The last turn with each of its answers, in order of attempts; () without turns."""
        last = self.turns[-1:]
        found = [*last, *(kept.in_turn(last[0]) for kept in self.kept)]
        return tuple(sorted(found, key=lambda turn: turn.attempt))

    @property
    def attempts(self) -> list[int]:
        """The attempts of `answers`."""
        return [turn.attempt for turn in self.answers]

    def open_again(self, text: Sequence[int]) -> Dialogue:
        """Return the dialogue without the last turn, whose answer is added to `kept`."""
        last = self.last
        tokens = tuple(text[last.answer_start : last.end])
        kept = self.kept
        if tokens:  # empty if the answer was interrupted before its first token
            values = {
                each.name: getattr(last, each.name)
                for each in fields(KeptAnswer)
                if each.name != "tokens"
            }
            kept = (*kept, KeptAnswer(tokens=tokens, **values))
        return Dialogue(self.turns[:-1], kept[-MAX_KEPT:])

    def choose(self, attempt: int, text: Sequence[int]) -> tuple[Dialogue, KeptAnswer]:
        """Return the dialogue with a replaced answer as its last one, and that answer.

        Raises:
            PyH2OError: unknown attempt.
        """
        chosen = next((each for each in self.kept if each.attempt == attempt), None)
        if chosen is None:
            available = ", ".join(map(str, self.attempts))
            raise PyH2OError(
                f"the last message has no answer of attempt {attempt}: available are {available}"
            )
        others = tuple(each for each in self.kept if each is not chosen)
        others = replace(self, kept=others).open_again(text).kept
        return Dialogue((*self.turns[:-1], chosen.in_turn(self.last)), others), chosen


class AnswerRun:
    """An answer in progress, as the last turn of a conversation.

    Attributes:
        turn: its turn, without what is not known yet.
        answer: the source of its events.
        before: earlier tokens, if it continues a stopped answer.
        finish: finish reason; "" while it is generated, and after an error.
        calls: tool calls at its end.
    """

    def __init__(self, answer: Answer, turn: Turn, before: Sequence[int]) -> None:
        """Start an answer, or continue it after the tokens `before`."""
        self.turn, self.answer, self.before = turn, answer, before
        self.finish = ""
        self.calls: tuple[Call, ...] = ()
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._n_shown = 0
        for event in answer.resumed:
            self.take(event)
        if before:  # text that is held back again has already been shown
            self._n_shown = len(turn.answer) - len("".join(self._texts))

    @property
    def n_new(self) -> int:
        """Number of new tokens."""
        return self.answer.generation.taken - len(self.before)

    @property
    def kept(self) -> int:
        """Number of its tokens to keep in the turn; 0 without new tokens, or after an error."""
        is_made = self.n_new if self.finish == FINISH_INTERRUPTED else self.finish
        return self.answer.generation.kept if is_made else 0

    def take(self, event: Event) -> list[str]:
        """Add an event; return the new text, reasoning as `ReasoningText`."""
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return [ReasoningText(event.text)]
        if not isinstance(event, Content) or not event.text:
            return []
        text = event.text.lstrip() if self._reasoning and not self._texts else event.text
        if text:
            self._texts.append(text)
        new = text[self._n_shown :]
        self._n_shown = max(0, self._n_shown - len(text))
        return [new] if new else []

    def end(self) -> list[str]:
        """Add the text that is held back, at the end of the answer."""
        rest = [text for event in self.answer.rest() for text in self.take(event)]
        if self.finish == FINISH_STOP and self.answer.calls:
            self.calls = tuple(Call(call.name, call.arguments) for call in self.answer.calls)
            self.finish = FINISH_TOOL_CALLS
        return rest

    def made_turn(self, end: int) -> Turn:
        """Return its turn, with the end of its last kept token."""
        return replace(
            self.turn,
            answer="".join(self._texts),
            finish=self.finish,
            end=end,
            calls=self.calls,
            thoughts="".join(self._reasoning),
        )


def answer_seed(seed: int, turn: int, attempt: int, step: int) -> int:
    """Return the seed of a part of an answer, derived from its position."""
    at = [turn, attempt, step] if step else [turn, attempt]
    state = np.random.SeedSequence([seed, *at]).generate_state(1)
    return int(state[0]) % (LARGEST_SEED + 1)
