"""Texts that have no place: what their caches held, as bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.intc]


@dataclass(eq=False)
class StoredText:
    """A text and the state of its cache behind all of its tokens.

    Attributes:
        tokens: of the text; [n_tokens].
        state: of its cache.
        uses: how often it came back into a place.
    """

    tokens: IntArray
    state: bytes
    uses: int = 0

    @property
    def n_tokens(self) -> int:
        """Of the text."""
        return len(self.tokens)


@dataclass(frozen=True)
class StoreCounts:
    """What became of texts that had to leave their places.

    Attributes:
        texts: that are stored now.
        bytes: that they take.
        moved_out: texts that were stored so far.
        moved_in: texts that came back into a place.
        dropped: texts that were dropped for others.
    """

    texts: int = 0
    bytes: int = 0
    moved_out: int = 0
    moved_in: int = 0
    dropped: int = 0


class TextStore:
    """Texts up to a number of bytes; what was put or found longest ago goes first.

    Attributes:
        counts: what became of them.
    """

    def __init__(self, most_bytes: int) -> None:
        self.counts = StoreCounts()
        self._most_bytes = most_bytes
        self._texts: list[StoredText] = []  # the one that is dropped first is first

    def takes(self, n_bytes: int) -> bool:
        """Whether a text of so many bytes can be put there at all."""
        return 0 < n_bytes <= self._most_bytes

    def put(self, tokens: IntArray, state: bytes) -> None:
        """Keep a text, in the place of others if it takes that."""
        self._texts = [text for text in self._texts if not _is_outgrown(text, tokens)]
        self._texts.append(StoredText(tokens, state))
        n_bytes = sum(len(text.state) for text in self._texts)
        n_dropped = 0
        while n_bytes > self._most_bytes:
            n_bytes -= len(self._texts.pop(0).state)
            n_dropped += 1
        self.counts = replace(
            self.counts,
            texts=len(self._texts),
            bytes=n_bytes,
            moved_out=self.counts.moved_out + 1,
            dropped=self.counts.dropped + n_dropped,
        )

    def find(self, wanted: IntArray) -> StoredText | None:
        """The longest text that the wanted one begins with, but for its last token; it stays."""
        found = [text for text in self._texts if is_beginning(text.tokens, wanted[:-1])]
        return max(found, key=lambda text: text.n_tokens, default=None)

    def note_use(self, text: StoredText) -> None:
        """A text came back into a place: drop it later than the others."""
        text.uses += 1
        self._texts.remove(text)
        self._texts.append(text)
        self.counts = replace(self.counts, moved_in=self.counts.moved_in + 1)


def _is_outgrown(text: StoredText, tokens: IntArray) -> bool:
    """Whether this was the beginning of one text only, which is longer now."""
    return text.uses <= 1 and is_beginning(text.tokens, tokens)


def is_beginning(tokens: IntArray, of: IntArray) -> bool:
    """Whether a text begins with these tokens."""
    return len(tokens) <= len(of) and bool(np.array_equal(tokens, of[: len(tokens)]))
