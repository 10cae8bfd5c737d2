"""The turns of a conversation, and the answers to its last message that were replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ..errors import PyH2OError
from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TRAINED_CONTEXT,
)
from .records import Count, Range

# So many answers that were replaced are kept; of more, the one that was replaced first goes.
MOST_KEPT = 20

ANSWER_FINISHES = (
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_TRAINED_CONTEXT,
    FINISH_INTERRUPTED,
)
Finish = Annotated[str, ANSWER_FINISHES]
Attempt = Annotated[int, Range(0, 2**31)]


@dataclass(frozen=True)
class Turn:
    """A message and its answer; positions count the tokens of the text.

    Attributes:
        user: the message.
        answer: the text of the answer.
        finish: why it ended: "stop", "length" (`max_tokens`, or a full cache that does not evict),
            "repetition" (it only repeated itself), "interrupted" or "trained_context".
        start: where the turn's tokens begin: with the end of the answer before.
        answer_start: the answer's first token.
        end: behind the answer's last token, whether that is evaluated yet or not.
        attempt: answers the message had before this one.
    """

    user: str
    answer: str
    finish: Finish
    start: Count
    answer_start: Count
    end: Count
    attempt: Attempt = 0


@dataclass(frozen=True)
class KeptAnswer:
    """An answer to the last message that another one has replaced.

    Attributes:
        answer, finish, attempt: as in a turn.
        tokens: of the answer; [n_tokens], at least one.
    """

    answer: str
    finish: Finish
    attempt: Attempt
    tokens: tuple[Count, ...]

    @classmethod
    def of(cls, turn: Turn, text: Sequence[int]) -> KeptAnswer:
        """The answer of a turn, whose tokens are in the text."""
        tokens = tuple(text[turn.answer_start : turn.end])
        return cls(turn.answer, turn.finish, turn.attempt, tokens)

    def in_turn(self, turn: Turn) -> Turn:
        """The turn with this answer in the place of its own."""
        return replace(
            turn,
            answer=self.answer,
            finish=self.finish,
            attempt=self.attempt,
            end=turn.answer_start + len(self.tokens),
        )


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
        last = [turn.attempt for turn in self.turns[-1:]]
        return sorted([*last, *(each.attempt for each in self.kept)])

    def answered(self, turn: Turn) -> Dialogue:
        """With one more turn, which has the kept answers."""
        return replace(self, turns=(*self.turns, turn))

    def open_again(self, text: Sequence[int]) -> Dialogue:
        """Without the last turn, whose answer is kept; its tokens are in the text."""
        kept = (*self.kept, KeptAnswer.of(self.last, text))
        return Dialogue(self.turns[:-1], kept[-MOST_KEPT:])

    def kept_answer(self, attempt: int) -> KeptAnswer:
        """An answer that was replaced.

        Raises:
            PyH2OError: there is no such answer.
        """
        for each in self.kept:
            if each.attempt == attempt:
                return each
        there = ", ".join(map(str, self.attempts))
        raise PyH2OError(
            f"the last message has no answer of attempt {attempt}: choose among {there}"
        )

    def choose(self, answer: KeptAnswer, text: Sequence[int]) -> Dialogue:
        """With an answer that was replaced in the place of the one in the text, which is kept."""
        others = tuple(each for each in self.kept if each is not answer)
        return replace(self, kept=others).open_again(text).answered(answer.in_turn(self.last))
