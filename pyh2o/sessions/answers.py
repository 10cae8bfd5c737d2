"""The answers of a conversation while they are drawn: one at a time, each with its own seed."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from ..core.detokenizer import detokenizer
from ..core.text import Text
from ..errors import PyH2OError
from ..writing.chat_template import ChatTemplate
from ..writing.finish import FINISH_INTERRUPTED, FINISH_REPETITION
from ..writing.generation import Generation
from ..writing.pieces import Piece, TextPieces
from ..writing.repetition import EndlessText
from ..writing.sampling import LARGEST_SEED
from .turns import Turn


class Answer:
    """An answer while it is drawn.

    Attributes:
        turn: that it makes, as far as it is known before.
        generation: its tokens as they come.
        before: those that were drawn before it was stopped, if it goes on now.
        finish: why it ended; empty before, and if an error ended it.
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
            detokenizer(llm.model, lead, starts_text=False),
            TextPieces(template.stops),
            is_end=lambda token: llm.model.is_end(token) or template.ends(token),
            limit=limit,
            watch=lambda token: FINISH_REPETITION if endless.add(token) else None,
        )
        self.finish = ""
        self.before = before
        self._texts: list[str] = []
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
        """Add pieces of its text; return what is new of them."""
        new = []
        for text in (piece.text for piece in pieces if piece.text):
            self._texts.append(text)
            new.append(text[self._n_shown :])
            self._n_shown = max(0, self._n_shown - len(text))
        return [text for text in new if text]

    def made_turn(self, end: int) -> Turn:
        """The turn it makes, with the position behind the last token that is kept."""
        return replace(self.turn, answer="".join(self._texts), finish=self.finish, end=end)


class LatestAnswer:
    """The generator of the answer that was begun last, which its reader may have left."""

    def __init__(self) -> None:
        self._generator: weakref.ref[Generator[str]] | None = None

    def begin(self, generator: Generator[str]) -> Generator[str]:
        """End the answer before it, and return the generator.

        Raises:
            PyH2OError: as for `end`.
        """
        self.end()
        # Not held: a generator that its reader drops ends at once, and keeps what was said.
        self._generator = weakref.ref(generator)
        return generator

    def end(self) -> None:
        """End the answer for good, if it has not ended yet.

        Raises:
            PyH2OError: it is being written at this moment.
        """
        generator = self._generator and self._generator()
        if not generator:
            return
        if inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING:
            raise PyH2OError("an answer is being written: wait for its end, or close its generator")
        generator.close()


def answer_seed(seed: int, turn: int, attempt: int) -> int:
    """The seed of an answer; different ones for all turns and attempts, the same in every run."""
    state = np.random.SeedSequence([seed, turn, attempt]).generate_state(1)
    return int(state[0]) % (LARGEST_SEED + 1)
