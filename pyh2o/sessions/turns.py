"""The turns of a conversation: who said what, and where in the text it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..generation.generation import Generation
from ..generation.sampling import LARGEST_SEED
from ..text.chat_template import ChatTemplate
from ..text.pieces import Piece


@dataclass(frozen=True)
class Turn:
    """A message and its answer; positions count the tokens of the text.

    Attributes:
        user: the message.
        answer: the text of the answer.
        finish: why it ended: "stop", "length" (`max_tokens`, or a full cache that does not evict),
            "interrupted" or "trained_context".
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


class Answer:
    """An answer while it is drawn.

    Attributes:
        start: position of its first token.
        attempt: answers the message had before this one.
        generation: its tokens as they come.
        finish: why it ended; empty before, and if an error ended it.
    """

    def __init__(self, turn: Turn, generation: Generation) -> None:
        """Begin the answer of a turn that has none yet, or another one."""
        self.start = turn.answer_start
        self.attempt = turn.attempt
        self.generation = generation
        self.finish = ""
        self._turn = turn
        self._texts: list[str] = []

    def take(self, pieces: Sequence[Piece]) -> list[str]:
        """Add pieces of its text; return their texts."""
        texts = [piece.text for piece in pieces if piece.text]
        self._texts += texts
        return texts

    def made_turn(self, end: int) -> Turn:
        """The turn it makes, with the position behind the last token that is kept."""
        return replace(self._turn, answer="".join(self._texts), finish=self.finish, end=end)


def answer_seed(seed: int, turn: int, attempt: int) -> int:
    """The seed of an answer; different ones for all turns and attempts, the same in every run."""
    state = np.random.SeedSequence([seed, turn, attempt]).generate_state(1)
    return int(state[0]) % (LARGEST_SEED + 1)


def rewritten(
    template: ChatTemplate, text: Sequence[int], turns: Sequence[Turn]
) -> tuple[list[int], tuple[Turn, ...]]:
    """A conversation with another template around the same messages and answers."""
    if not turns:
        return list(template.opening), ()
    tokens: list[int] = []
    moved: list[Turn] = []
    for turn in turns:
        if moved:
            start, new = len(tokens), template.next_turn(turn.user)
        else:
            new = template.first_turn(turn.user)
            start = n_equal(new[:-1], template.opening)
        tokens += new
        answer_start = len(tokens)
        tokens += text[turn.answer_start : turn.end]
        moved.append(replace(turn, start=start, answer_start=answer_start, end=len(tokens)))
    return tokens, tuple(moved)


def n_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
