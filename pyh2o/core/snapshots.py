"""Texts that have no place: what their caches held, as bytes in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from mmap import mmap

import numpy as np
import numpy.typing as npt

from .prefixes import n_common

IntArray = npt.NDArray[np.intc]


@dataclass(eq=False)
class Snapshot:
    """A text and the state of its cache behind all of its tokens.

    Attributes:
        tokens: of the text; [n_tokens].
        prompt: those that are not forgotten: what a prompt that goes on from it begins with.
        state: of its cache.
        shared: whether several texts begin with it.
        is_prompt: whether it is a prompt, which may come again.
        worth: the text with the lowest is dropped first.
        uses: how often it came back into a place.
    """

    tokens: IntArray
    prompt: IntArray
    state: mmap
    shared: bool
    is_prompt: bool
    worth: float = 0.0
    uses: int = 0


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


class SnapshotStore:
    """Texts up to a number of bytes: those stay that spare most reading for their size.

    How much a text is worth follows GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies
    Performance with Greedy-Dual-Size-Frequency Caching Policy", 1998): uses x tokens / bytes, on
    top of what the text was worth that was dropped last, so that what was used long ago goes
    although it was used often.
    """

    def __init__(self, most_bytes: int) -> None:
        """Room for so many bytes."""
        self._most_bytes = most_bytes
        self._texts: list[Snapshot] = []
        self._age = 0.0
        self._n_out = self._n_in = self._n_dropped = 0
        # places are taken in one thread while a text in another one has read what is shared
        self._lock = threading.Lock()

    @property
    def counts(self) -> StoreCounts:
        """What became of them."""
        with self._lock:
            n_bytes = self._n_bytes()
            return StoreCounts(len(self._texts), n_bytes, self._n_out, self._n_in, self._n_dropped)

    def close(self) -> None:
        """Drop all texts."""
        with self._lock:
            self._texts.clear()

    def takes(self, n_bytes: int) -> bool:
        """Whether a text of so many bytes can be put there at all."""
        return 0 < n_bytes <= self._most_bytes

    def put(self, stored: Snapshot) -> None:
        """Keep a text, or a beginning that several share; others go if it takes that.

        What it went on from goes; of prompts only that of an earlier turn, for a later one.
        """
        with self._lock:
            self._texts = [
                text
                for text in self._texts
                if text.shared
                or (text.is_prompt and not stored.is_prompt)
                or not _is_prefix(text.prompt, stored.prompt)
            ]
            if len(stored.state) > self._most_bytes:
                return
            while self._texts and self._n_bytes() + len(stored.state) > self._most_bytes:
                least = min(self._texts, key=lambda text: text.worth)
                self._age = least.worth
                self._texts.remove(least)
                self._n_dropped += 1
            self._appraise(stored)
            self._texts.append(stored)
            self._n_out += 1

    def find(self, wanted: IntArray) -> Snapshot | None:
        """The longest text that the wanted one begins with, but for its last token; it stays."""
        with self._lock:
            found = [text for text in self._texts if _is_prefix(text.prompt, wanted[:-1])]
        return max(found, key=lambda text: len(text.prompt), default=None)

    def most_common(self, wanted: IntArray) -> int:
        """How many tokens the wanted text has in common with the one that begins most like it."""
        with self._lock:
            return max((n_common(text.prompt, wanted) for text in self._texts), default=0)

    def note_use(self, text: Snapshot) -> None:
        """A text came back into a place: it is worth more."""
        with self._lock:
            text.uses += 1
            self._appraise(text)
            self._n_in += 1

    def _appraise(self, text: Snapshot) -> None:
        text.worth = self._age + (text.uses + 1) * len(text.prompt) / len(text.state)

    def _n_bytes(self) -> int:
        return sum(len(text.state) for text in self._texts)


def _is_prefix(tokens: IntArray, of: IntArray) -> bool:
    return n_common(tokens, of) == len(tokens)
