"""The loop of all generated texts: take a token, look for what ends the text, give out its text.

Where the tokens come from, and what else happens with them, is not known here: a completion takes
those of `Llama.generate`, conversations and stories those of a `Writer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.detokenizer import Detokenizer
from .finish import FINISH_LENGTH, FINISH_STOP
from .pieces import Piece, TextPieces


class Generation:
    """A text while it is generated.

    Attributes:
        tokens: what was taken is added here, without a token that means "end".
        finish: why the text ended; None while it goes on, and if the tokens ended by themselves:
            who gave them knows why.
        taken: number of tokens taken.
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
        """Get ready to take tokens.

        Args:
            tokens: to which the new ones are added.
            parts: gives the bytes of each token.
            text: makes pieces of them, and finds the stop strings.
            is_end: whether a token means "end".
            limit: most tokens to take; None for any number.
            at_stop: finish reason if a stop string came.
            watch: called with each token that was added; what it returns, if anything, is the
                finish reason, unless a stop string came.
        """
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
            For each token the text that is ready with it, as soon as no stop string can begin in
            it. With the last one `finish` is set.
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
        """Take tokens again that are in `tokens` already, to go on behind them.

        Returns:
            The text that they made. The limit counts the tokens behind them.
        """
        pieces = [piece for token in tokens for piece in self._text.feed(self._parts.feed(token))]
        self.taken += len(tokens)
        if self._limit is not None:
            self._limit += len(tokens)
        return self._given(pieces)

    def end(self) -> list[Piece]:
        """Return the text that is held back, up to a stop string; nothing can come after it."""
        held_back = self._parts.finish()
        pieces: list[Piece] = []
        if held_back and not self._text.stopped:
            pieces = self._text.feed(held_back, tokens=0)
        return self._given(pieces + self._text.finish())

    @property
    def kept(self) -> int:
        """Number of tokens taken, after `end` without those of a stop string."""
        return self._n_given if self._text.stopped else self.taken

    @property
    def stop(self) -> bytes:
        """What begins with the stop string that ended the text; nothing where none did."""
        return self._text.held if self._text.stopped else b""

    def _why_ended(self, token: int) -> str | None:
        reason = None if self._watch is None else self._watch(token)
        if self._text.stopped:
            return self._at_stop
        if reason is None and self.taken == self._limit:
            return FINISH_LENGTH
        return reason

    def _given(self, pieces: list[Piece]) -> list[Piece]:
        # A piece without text is the beginning of the stop string.
        stopped = self._text.stopped
        self._n_given += sum(piece.tokens for piece in pieces if piece.text or not stopped)
        return pieces
