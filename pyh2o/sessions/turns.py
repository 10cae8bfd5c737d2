"""The turns of a conversation, and the answers to its last message that were replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ..writing.finish import FINISH_STOP
from .records import Count, Range

# So many answers that were replaced are kept; of more, the one that was replaced first goes.
MOST_KEPT = 20


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
    finish: str
    start: int
    answer_start: int
    end: int
    attempt: int = 0


@dataclass(frozen=True)
class KeptAnswer:
    """An answer to the last message that another one has replaced.

    Attributes:
        answer, finish, attempt: as in a turn.
        tokens: of the answer; [n_tokens], at least one.
    """

    answer: str
    finish: str
    attempt: Annotated[int, Range(0, 2**31)]
    tokens: tuple[Count, ...]

    @classmethod
    def of(cls, turn: Turn, text: Sequence[int]) -> KeptAnswer:
        """The answer of a turn, whose tokens are in the text."""
        tokens = tuple(text[turn.answer_start : turn.end])
        return cls(turn.answer, turn.finish, turn.attempt, tokens)

    @property
    def n_known(self) -> int:
        """How many of its tokens were evaluated: all, if the model has ended it behind them."""
        return len(self.tokens) - (self.finish != FINISH_STOP)

    def in_turn(self, turn: Turn) -> Turn:
        """The turn with this answer in the place of its own."""
        return replace(
            turn,
            answer=self.answer,
            finish=self.finish,
            attempt=self.attempt,
            end=turn.answer_start + len(self.tokens),
        )


def attempts(turns: Sequence[Turn], kept: Sequence[KeptAnswer]) -> list[int]:
    """The attempts of all answers to the last message, in their order."""
    last = [turn.attempt for turn in turns[-1:]]
    return sorted([*last, *(each.attempt for each in kept)])
