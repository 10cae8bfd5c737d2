"""The answers to the last message in whose place there is another one now; they can come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ..errors import PyH2OError
from ..generation.finish import FINISH_STOP
from ..llama import Llama
from .records import Count, Range
from .turns import Turn

# As many are kept; of more, the one that was replaced first goes. A session's header has them all.
MOST = 20


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


def with_replaced(kept: tuple[KeptAnswer, ...], answer: KeptAnswer) -> tuple[KeptAnswer, ...]:
    """The answers that are kept once another one was replaced, in the order of that."""
    return (*kept, answer)[-MOST:]


def attempts(turns: Sequence[Turn], kept: Sequence[KeptAnswer]) -> list[int]:
    """The attempts of all answers to the last message, in their order."""
    last = [turn.attempt for turn in turns[-1:]]
    return sorted([*last, *(each.attempt for each in kept)])


def find_answer(kept: Sequence[KeptAnswer], turn: Turn, attempt: int) -> KeptAnswer:
    """The answer of an attempt.

    Args:
        kept: those that were replaced.
        turn: the last one.
        attempt: of which the answer is wanted.

    Raises:
        PyH2OError: there is none, or it is not kept any more.
    """
    for each in kept:
        if each.attempt == attempt:
            return each
    there = ", ".join(map(str, attempts([turn], kept)))
    raise PyH2OError(f"the last message has no answer of attempt {attempt}: choose among {there}")


def check_kept(kept: Sequence[KeptAnswer], turns: Sequence[Turn]) -> None:
    """Refuse answers that no conversation keeps, in a header that somebody may have edited.

    Raises:
        ValueError: there is no turn for them, two are of one attempt, or one has no tokens.
    """
    if kept and len(set(attempts(turns, kept))) != len(kept) + 1:
        raise ValueError("it keeps two answers of one attempt, or to no message")
    if not all(each.tokens for each in kept):
        raise ValueError("an answer it keeps has no tokens")


def check_known(kept: Sequence[KeptAnswer], llm: Llama) -> None:
    """Refuse answers of which the model does not know a token.

    Raises:
        ValueError: it does not.
    """
    if any(token >= llm.n_vocab() for each in kept for token in each.tokens):
        raise ValueError("an answer it keeps has tokens the model does not know")
