"""From bytes to text, one token at a time: whole characters, up to a stop string.

The work for a token depends on that token, the stop strings and the text that is still held back,
never on the length of the text. The pieces of text joined are the bytes of all tokens, cut at
the first stop string, decoded as UTF-8 with invalid bytes left out.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


class StopFinder:
    """Finds the first stop string in bytes that come in parts, across the borders of the parts.

    Attributes:
        size: bytes fed so far.
        found: where the earliest stop string begins, or None. After that, feed no more.
        safe: bytes of the text that no stop string can begin in any more, however it goes on.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._tail = b""
        self.size = 0
        self.found: int | None = None
        self.safe = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        # A stop string that ends in the new bytes begins in them or in this much before them.
        window = self._tail + data
        start = self.size - len(self._tail)
        self.size += len(data)
        hits = [hit for stop in self._stops if (hit := window.find(stop)) >= 0]
        if hits:
            self.found = start + min(hits)
            self.safe = self.found
            return
        self.safe = self.size - max((_overlap(window, stop) for stop in self._stops), default=0)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else b""


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of `text` that is a beginning, not all, of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """Text that is ready to be shown, and how many tokens it came from."""

    text: str
    tokens: int


@dataclass
class _Span:
    """Bytes of the fewest tokens that end with a whole character."""

    start: int
    data: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    whole: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def piece(self, end: int) -> Piece:
        """The text up to position `end`."""
        return Piece(self.data[: end - self.start].decode(errors="ignore"), self.tokens)


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
        self._finder = StopFinder(self._stops)
        # Its output is not used, only whether it waits for the rest of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._held: deque[_Span] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come with the last bytes."""
        return self._finder.found is not None

    @property
    def held(self) -> bytes:
        """Bytes held back: an unfinished character, what a stop string may begin in, or one."""
        return self._left + b"".join(bytes(span.data) for span in self._held)

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
        if not self._held:
            return []
        found = self._finder.found
        end = self._finder.size if found is None else found
        if found is not None:
            self._left = self.held[found - self._held[0].start :]
            came = [stop for stop in self._stops if self._left.startswith(stop)]
            self.unsearched = max(map(len, came))
        rest: list[Piece] = []
        while self._held:
            span = self._held.popleft()
            rest.append(span.piece(end))
            if span.end >= end:
                break
        self._held.clear()
        return self._given(rest)

    def _feed(self, data: bytes, tokens: int) -> list[Piece]:
        if not self._held or self._held[-1].whole:
            self._held.append(_Span(start=self._finder.size))
        span = self._held[-1]
        span.data += data
        span.tokens += tokens
        self._decoder.decode(data)
        span.whole = not self._decoder.getstate()[0]
        self._finder.feed(data)
        ready: list[Piece] = []
        while not self.stopped and self._held and self._is_ready(self._held[0]):
            span = self._held.popleft()
            ready.append(span.piece(span.end))
        return ready

    def _is_ready(self, span: _Span) -> bool:
        return span.whole and span.end <= self._finder.safe

    def _given(self, pieces: list[Piece]) -> list[Piece]:
        self.size += sum(len(piece.text.encode()) for piece in pieces)
        return pieces
