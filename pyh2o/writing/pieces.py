"""Incremental conversion of bytes to text: whole characters, up to a stop string.

The work per token does not depend on the length of the text. The joined pieces are the bytes of all
tokens up to the first stop string, decoded as UTF-8 without invalid bytes.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Text, and the number of its tokens."""

    text: str
    tokens: int


class ReasoningText(str):
    """Text of the reasoning, which is not part of the answer."""

    __slots__ = ()


@dataclass
class _Span:
    """Bytes of consecutive tokens; `whole` if they end with a complete character."""

    data: bytes = b""
    tokens: int = 0
    whole: bool = False

    def piece(self, n_bytes: int) -> Piece:
        """Return the text of the first `n_bytes` bytes."""
        return Piece(self.data[:n_bytes].decode(errors="ignore"), self.tokens)


class TextPieces:
    """Converts the bytes of tokens to pieces of text.

    A piece has the text of one token, or of several until a character is complete. It is held back
    while a stop string may start in it. A complete stop string stays held back, until more bytes
    are fed: then it is emitted as text, and the text continues.

    Attributes:
        size: number of emitted bytes in UTF-8.
        unsearched: number of held bytes to emit without a search for stop strings when the text
            continues.
    """

    def __init__(
        self, stops: Sequence[bytes] = (), *, held: bytes = b"", unsearched: int = 0, size: int = 0
    ) -> None:
        """Start, or resume from the state of another object."""
        self._stops = [stop for stop in stops if stop]
        self.size = size
        self.unsearched = unsearched
        self._begin(held)

    def _begin(self, left: bytes) -> None:
        # Bytes before the next ones that are fed.
        self._left = left
        # Start of a stop string in the spans.
        self._found: int | None = None
        # Only its state is used: whether a character is incomplete.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._spans: deque[_Span] = deque()

    @property
    def stopped(self) -> bool:
        """Whether the last bytes have completed a stop string."""
        return self._found is not None

    @property
    def held(self) -> bytes:
        """Bytes held back: an incomplete character, the possible start of a stop string, or one."""
        return self._left + b"".join(span.data for span in self._spans)

    def feed(self, data: bytes, tokens: int = 1) -> list[Piece]:
        """Add the bytes of the next token or tokens; return the pieces that are ready."""
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
        # Stop strings can no longer start in the first `safe` bytes.
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
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
