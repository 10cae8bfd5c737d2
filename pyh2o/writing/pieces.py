"""From bytes to text, one token at a time: whole characters, up to a stop string.

The work for a token depends on that token, the stop strings and the text that is still held back,
never on the length of the text. The pieces of text joined are the bytes of all tokens, cut at
the first stop string, decoded as UTF-8 with invalid bytes left out.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Text that is ready to be shown, and how many tokens it came from."""

    text: str
    tokens: int


class ReasoningText(str):
    """Text that a model thinks before it answers: no part of the answer."""

    __slots__ = ()


@dataclass
class _Span:
    """Bytes of the fewest tokens that end with a whole character, once that is there."""

    data: bytes = b""
    tokens: int = 0
    whole: bool = False

    def piece(self, n_bytes: int) -> Piece:
        """The text of its first bytes."""
        return Piece(self.data[:n_bytes].decode(errors="ignore"), self.tokens)


class TextPieces:
    """Bytes of token after token in, pieces of text out.

    A piece holds the text of one token, or of as many as it takes to end with a whole character.
    It is held back as long as a stop string may begin in it. A stop string that has come stays held
    back; to feed more is to go on behind it: it is then given out like the rest.

    Attributes:
        size: bytes given out so far, as UTF-8.
        unsearched: how many of the first bytes held back are given out without a search for stop
            strings, when the text goes on.
    """

    def __init__(
        self, stops: Sequence[bytes] = (), *, held: bytes = b"", unsearched: int = 0, size: int = 0
    ) -> None:
        """Begin, or go on where another object of this class was."""
        self._stops = [stop for stop in stops if stop]
        self.size = size
        self.unsearched = unsearched
        self._begin(held)

    def _begin(self, left: bytes) -> None:
        # What comes before the bytes that are fed next.
        self._left = left
        # Where a stop string begins in the spans.
        self._found: int | None = None
        # Its output is not used, only whether it waits for the rest of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._spans: deque[_Span] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come with the last bytes."""
        return self._found is not None

    @property
    def held(self) -> bytes:
        """Bytes held back: an unfinished character, what a stop string may begin in, or one."""
        return self._left + b"".join(span.data for span in self._spans)

    def feed(self, data: bytes, tokens: int = 1) -> list[Piece]:
        """Add the bytes of the next token or tokens; return the pieces that are ready now."""
        ready: list[Piece] = []
        if self.stopped:
            ready += self.finish()
            self._begin(self._left)
        if self._left:
            if self.unsearched:
                ready += self._given([Piece(self._left[: self.unsearched].decode(), 0)])
            data = self._left[self.unsearched :] + data
            self._left, self.unsearched = b"", 0
        return ready + self._given(self._feed(data, tokens))

    def finish(self) -> list[Piece]:
        """Return the pieces held back, up to the stop string or the end of the text."""
        if not self._spans:
            return []
        held = self.held
        left = len(held) if self._found is None else self._found
        if self._found is not None:
            self._left = held[left:]
            self.unsearched = max(len(stop) for stop in self._stops if self._left.startswith(stop))
        rest: list[Piece] = []
        for span in self._spans:
            rest.append(span.piece(left))
            left -= len(span.data)
            if left <= 0:
                break
        self._spans.clear()
        return self._given(rest)

    def _feed(self, data: bytes, tokens: int) -> list[Piece]:
        if not self._spans or self._spans[-1].whole:
            self._spans.append(_Span())
        span = self._spans[-1]
        span.data += data
        span.tokens += tokens
        self._decoder.decode(data)
        span.whole = not self._decoder.getstate()[0]
        held = self.held
        hits = [hit for stop in self._stops if (hit := held.find(stop)) >= 0]
        if hits:
            self._found = min(hits)
            return []
        # No stop string can begin in the first so many bytes any more, however the text goes on.
        safe = len(held) - max((_overlap(held, stop) for stop in self._stops), default=0)
        ready: list[Piece] = []
        while self._spans and self._spans[0].whole and len(self._spans[0].data) <= safe:
            span = self._spans.popleft()
            safe -= len(span.data)
            ready.append(span.piece(len(span.data)))
        return ready

    def _given(self, pieces: list[Piece]) -> list[Piece]:
        self.size += sum(len(piece.text.encode()) for piece in pieces)
        return pieces


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of `text` that is a beginning, not all, of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
