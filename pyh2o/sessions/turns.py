"""The turns of a conversation: those that were said, and the answer that is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Annotated

import numpy as np

from ..core.detokenizer import detokenizer
from ..core.text import Text
from ..errors import PyH2OError
from ..writing.chat_parser import Part
from ..writing.chat_template import ChatTemplate
from ..writing.events import Content, Reasoning
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    FINISH_TRAINED_CONTEXT,
)
from ..writing.generation import Generation
from ..writing.pieces import Piece, ReasoningText, TextPieces
from ..writing.repetition import EndlessText
from ..writing.sampling import LARGEST_SEED
from ..writing.tools import Call
from .records import Count

# So many answers that were replaced are kept; of more, the one that was replaced first goes.
MOST_KEPT = 20

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
    """A part of an answer that ended in calls of tools.

    Attributes:
        text: of it, beside the calls.
        calls: with their results.
        n_tokens: of the part and of the results, with what the template writes around them.
        thoughts: before the text.
    """

    text: str
    calls: tuple[Call, ...]
    n_tokens: Count
    thoughts: str = ""


@dataclass(frozen=True)
class Turn:
    """A message and its answer; positions count the tokens of the text.

    Attributes:
        user: the message.
        answer: the text of the answer; behind calls of tools, what comes after their results.
        finish: why it ended: "stop", "length" (`max_tokens`, or a full cache that does not evict),
            "repetition" (it only repeated itself), "interrupted", "trained_context" or
            "tool_calls" (it waits for results).
        start: where the turn's tokens begin: with the end of the answer before.
        answer_start: the answer's first token, that of its first step if it has some.
        end: behind the answer's last token, whether that is evaluated yet or not.
        attempt: answers the message had before this one.
        told: what the model was told before the message (see `lorebooks`).
        steps: parts of the answer before that called tools.
        calls: that wait for their results.
        thoughts: before the answer's text.
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
        """All that comes before the answer."""
        return f"{self.told}\n\n{self.user}" if self.told else self.user

    @property
    def part_starts(self) -> list[int]:
        """Where the parts of the answer begin: the steps, and what comes behind their results."""
        return [*accumulate((step.n_tokens for step in self.steps), initial=self.answer_start)]


@dataclass(frozen=True)
class KeptAnswer:
    """An answer to the last message that another one has replaced.

    Attributes:
        answer, finish, attempt, steps, calls, thoughts: as in a turn.
        tokens: of the answer; [n_tokens], at least one.
    """

    answer: str
    finish: Finish
    attempt: Count
    tokens: tuple[Count, ...]
    steps: tuple[Step, ...] = ()
    calls: tuple[Call, ...] = ()
    thoughts: str = ""

    def in_turn(self, turn: Turn) -> Turn:
        """The turn with this answer in the place of its own."""
        said = {name: value for name, value in vars(self).items() if name != "tokens"}
        return replace(turn, **said, end=turn.answer_start + len(self.tokens))


@dataclass(frozen=True)
class Dialogue:
    """What was said.

    Attributes:
        turns: all messages that have an answer.
        kept: answers to the last one that were replaced, in the order of that.
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
            raise PyH2OError("nothing has been said yet: say something")
        return self.turns[-1]

    @property
    def answers(self) -> tuple[Turn, ...]:
        """The last turn with each of its answers, by their attempts; () without one."""
        last = self.turns[-1:]
        found = [*last, *(kept.in_turn(last[0]) for kept in self.kept)]
        return tuple(sorted(found, key=lambda turn: turn.attempt))

    @property
    def attempts(self) -> list[int]:
        """Of these answers."""
        return [turn.attempt for turn in self.answers]

    def open_again(self, text: Sequence[int]) -> Dialogue:
        """Without the last turn, whose answer is kept; its tokens are in the text."""
        last = self.last
        tokens = tuple(text[last.answer_start : last.end])
        kept = self.kept
        if tokens:  # it was not cut off before its first one
            said = {
                each.name: getattr(last, each.name)
                for each in fields(KeptAnswer)
                if each.name != "tokens"
            }
            kept = (*kept, KeptAnswer(tokens=tokens, **said))
        return Dialogue(self.turns[:-1], kept[-MOST_KEPT:])

    def choose(self, attempt: int, text: Sequence[int]) -> tuple[Dialogue, KeptAnswer]:
        """With an answer that was replaced in the place of the one in the text, which is kept.

        Raises:
            PyH2OError: there is no such answer.
        """
        chosen = next((each for each in self.kept if each.attempt == attempt), None)
        if chosen is None:
            there = ", ".join(map(str, self.attempts))
            raise PyH2OError(
                f"the last message has no answer of attempt {attempt}: choose among {there}"
            )
        others = tuple(each for each in self.kept if each is not chosen)
        others = replace(self, kept=others).open_again(text).kept
        return Dialogue((*self.turns[:-1], chosen.in_turn(self.last)), others), chosen


class Answer:
    """An answer while it is drawn.

    Attributes:
        turn: that it makes, as far as it is known before.
        generation: its tokens as they come.
        before: those that were drawn before it was stopped, if it goes on now.
        finish: why it ended; empty before, and if an error ended it.
        calls: of tools, at its end.
    """

    def __init__(
        self,
        llm: Text,
        template: ChatTemplate,
        text: list[int],
        turn: Turn,
        lead: Sequence[int],
        before: Sequence[int],
        limit: int | None,
    ) -> None:
        """Begin the answer of a turn, behind the tokens `lead`; or go on with it, behind `before`.

        Its tokens are added to `text`, `limit` at most.
        """
        endless = EndlessText(before)
        self.turn = turn
        self.generation = generation = Generation(
            text,
            detokenizer(llm.model, lead, starts_text=False, shown=template.shown),
            TextPieces(template.stops),
            is_end=lambda token: llm.model.is_end(token) or template.ends(token),
            limit=limit,
            watch=lambda token: FINISH_REPETITION if endless.add(token) else None,
        )
        self.finish = ""
        self.before = before
        self.calls: tuple[Call, ...] = ()
        self._parser = template.parser()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._n_shown = 0
        if before:
            self.take(generation.repeat(before))
            # what the end of an answer is held back for has been shown already
            self._n_shown = len(turn.answer) - len("".join(self._texts))

    @property
    def has_begun(self) -> bool:
        """Whether there is a new token."""
        return self.generation.taken > len(self.before)

    @property
    def kept(self) -> int:
        """How many of its tokens make a turn; 0 if there is nothing new of it, or an error."""
        is_made = self.has_begun if self.finish == FINISH_INTERRUPTED else self.finish
        return self.generation.kept if is_made else 0

    def take(self, pieces: Sequence[Piece]) -> list[str]:
        """Add pieces of its text; return what is new of them, thoughts as `ReasoningText`."""
        new = list[str]()
        for text in (piece.text for piece in pieces if piece.text):
            new += (
                self._added(text)
                if self._parser is None
                else self._told_apart(self._parser.add(text))
            )
        return new

    def end(self) -> list[str]:
        """Add what is held back; nothing can come after it."""
        rest = self.take(self.generation.end())
        if self._parser is None:
            return rest
        rest += self._told_apart(self._parser.end())
        if self.finish == FINISH_STOP and self._parser.calls:
            self.calls = tuple(Call(call.name, call.arguments) for call in self._parser.calls)
            self.finish = FINISH_TOOL_CALLS
        return rest

    def _told_apart(self, parts: Sequence[Part]) -> list[str]:
        new = list[str]()
        for part in parts:
            if isinstance(part, Reasoning):
                self._thoughts.append(part.text)
                new.append(ReasoningText(part.text))
            elif isinstance(part, Content):
                is_first = not self._texts and self._thoughts
                new += self._added(part.text.lstrip() if is_first else part.text)
        return new

    def _added(self, text: str) -> list[str]:
        """Add what is said; return what was not shown before."""
        if text:
            self._texts.append(text)
        new = text[self._n_shown :]
        self._n_shown = max(0, self._n_shown - len(text))
        return [new] if new else []

    def made_turn(self, end: int) -> Turn:
        """The turn it makes, with the position behind the last token that is kept."""
        return replace(
            self.turn,
            answer="".join(self._texts),
            finish=self.finish,
            end=end,
            calls=self.calls,
            thoughts="".join(self._thoughts),
        )


def answer_seed(seed: int, turn: int, attempt: int, step: int) -> int:
    """The seed of a part of an answer; each has its own, which is the same in every run."""
    at = [turn, attempt, step] if step else [turn, attempt]
    state = np.random.SeedSequence([seed, *at]).generate_state(1)
    return int(state[0]) % (LARGEST_SEED + 1)
