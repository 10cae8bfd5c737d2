"""The text of a story: given out as it comes, up to a stop text, and on from there if asked to."""

from __future__ import annotations

from collections.abc import Sequence

from .text_stream import TextStream


class StoryText:
    """Bytes of token after token in, text out.

    Bytes are held back while a character is unfinished or a stop text may begin in them. A stop
    text that has come is held back, too. To feed more is to go on behind it: it is then given out
    like the rest.

    Attributes:
        size: bytes given out so far, as UTF-8.
        unsearched: how many of the first bytes held back are given out without a search for stop
            texts, when the text goes on.
        stopped: whether a stop text has come with the last bytes.
    """

    def __init__(
        self, until: Sequence[str], *, held: bytes = b"", unsearched: int = 0, size: int = 0
    ) -> None:
        """Begin, or go on where another object of this class was; empty stop texts are none."""
        self._stops = [text.encode() for text in until if text]
        self._stream: TextStream | None = None
        self._held = held
        self.unsearched = unsearched
        self.size = size
        self.stopped = False

    @property
    def held(self) -> bytes:
        """The bytes that come after those given out."""
        return self._held if self._stream is None else self._stream.held

    def feed(self, data: bytes) -> str:
        """Add the bytes of the next token; return the text that is certain now."""
        text = ""
        if self._stream is None:
            text = self._held[: self.unsearched].decode()
            data = self._held[self.unsearched :] + data
            self._stream = TextStream(self._stops)
            self.unsearched, self.stopped = 0, False
        pieces = self._stream.feed(data)
        if self._stream.stopped:
            self._held = self._stream.held_stop
            found = [stop for stop in self._stops if self._held.startswith(stop)]
            self.unsearched, self.stopped = max(map(len, found)), True
            pieces += self._stream.finish()
            self._stream = None
        text += "".join(piece.text for piece in pieces)
        self.size += len(text.encode())
        return text
