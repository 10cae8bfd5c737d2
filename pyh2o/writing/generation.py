"""The loop of every generated text: take a token, check for the end, emit its text.

It does not depend on the source of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.detokenizer import Detokenizer
from .finish import FINISH_LENGTH, FINISH_STOP
from .pieces import Piece, TextPieces


class Generation:
    """A text while it is generated.

    Attributes:
        tokens: tokens taken so far are appended here, except an end token.
        finish: finish reason; None while the text continues, and if the source had no more tokens.
    """

    def __init__(
        self,
        tokens: list[int],
        parts: Detokenizer,
        text: TextPieces,
        *,
        is_end: Callable[[int], bool],
        limit: int | None = None,
        at_stop: str = FINISH_STOP,
        watch: Callable[[int], str | None] | None = None,
    ) -> None:
        """`watch` returns a finish reason for a new token, or None; a stop string has priority."""
        self.tokens = tokens
        self.finish: str | None = None
        self.taken = 0
        self._parts = parts
        self._text = text
        self._is_end = is_end
        self._limit = limit
        self._at_stop = at_stop
        self._watch = watch
        self._n_given = 0

    def run(self, tokens: Iterable[int]) -> Iterator[list[Piece]]:
        """Take tokens until the text ends.

        Yields:
            For each token the text that is ready, which no stop string can start in any more.
            `finish` is set with the last one.
        """
        for token in tokens:
            if self._is_end(token):
                self.finish = FINISH_STOP
                return
            self.tokens.append(token)
            self.taken += 1
            pieces = self._given(self._text.feed(self._parts.feed(token)))
            self.finish = self._why_ended(token)
            yield pieces
            if self.finish is not None:
                return

    def repeat(self, tokens: Sequence[int]) -> list[Piece]:
        """Return the text of tokens that `tokens` has already, to continue after them.

        They do not count towards the limit.
        """
        pieces = [piece for token in tokens for piece in self._text.feed(self._parts.feed(token))]
        self.taken += len(tokens)
        if self._limit is not None:
            self._limit += len(tokens)
        return self._given(pieces)

    def end(self) -> list[Piece]:
        """Return the text that was held back, up to a stop string."""
        held_back = self._parts.finish()
        pieces: list[Piece] = []
        if held_back and not self._text.stopped:
            pieces = self._text.feed(held_back, tokens=0)
        return self._given(pieces + self._text.finish())

    @property
    def kept(self) -> int:
        """Number of tokens taken; after `end` without those of a stop string."""
        return self._n_given if self._text.stopped else self.taken

    @property
    def stop(self) -> bytes:
        """Text from the start of the stop string that ended the text; empty without one."""
        return self._text.held if self._text.stopped else b""

    def _why_ended(self, token: int) -> str | None:
        reason = None if self._watch is None else self._watch(token)
        if self._text.stopped:
            return self._at_stop
        if reason is None and self.taken == self._limit:
            return FINISH_LENGTH
        return reason

    def _given(self, pieces: list[Piece]) -> list[Piece]:
        # a piece without text is the start of the stop string
        stopped = self._text.stopped
        self._n_given += sum(piece.tokens for piece in pieces if piece.text or not stopped)
        return pieces
