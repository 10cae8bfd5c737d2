"""Texts that have no place: what their caches held, as bytes in memory or in files."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import SettingsError
from .beginnings import n_common

IntArray = npt.NDArray[np.intc]


@dataclass(eq=False)
class StoredText:
    """A text and the state of its cache behind all of its tokens.

    Attributes:
        tokens: of the text; [n_tokens].
        state: of its cache, or the file that has it.
        n_bytes: that the state takes.
        shared: whether several texts begin with it.
        worth: the text with the lowest is dropped first.
        uses: how often it came back into a place.
    """

    tokens: IntArray
    state: mmap | Path
    n_bytes: int
    shared: bool
    worth: float = 0.0
    uses: int = 0

    @property
    def n_tokens(self) -> int:
        """Of the text."""
        return len(self.tokens)

    def read(self) -> mmap | bytes:
        """The state.

        Raises:
            OSError: its file cannot be read.
        """
        return self.state.read_bytes() if isinstance(self.state, Path) else self.state


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
    """Texts up to a number of bytes: those stay that spare most reading for their size.

    How much a text is worth follows GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies
    Performance with Greedy-Dual-Size-Frequency Caching Policy", 1998): uses x tokens / bytes, on
    top of what the text was worth that was dropped last, so that what was used long ago goes
    although it was used often.

    Attributes:
        counts: what became of them.
    """

    def __init__(self, most_bytes: int, folder: Path | None = None) -> None:
        """Room for so many bytes, in memory or in a folder, where files of its own come and go.

        Raises:
            SettingsError: no files can be made in the folder.
        """
        self.counts = StoreCounts()
        self._most_bytes = most_bytes
        self._texts: list[StoredText] = []
        self._age = 0.0
        self._numbers = itertools.count()
        # places are taken in one thread while a text in another one has read what is shared
        self._lock = threading.Lock()
        self._folder = None
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._folder = tempfile.TemporaryDirectory(prefix="texts-", dir=folder)
            except OSError as error:
                raise SettingsError(
                    f"store_dir {folder} cannot be used: {error.strerror}; give another folder"
                ) from error

    def close(self) -> None:
        """Drop all texts."""
        with self._lock:
            self._texts.clear()
            if self._folder is not None:
                self._folder.cleanup()

    def takes(self, n_bytes: int) -> bool:
        """Whether a text of so many bytes can be put there at all."""
        return 0 < n_bytes <= self._most_bytes

    def put(self, tokens: IntArray, state: mmap, *, shared: bool = False) -> None:
        """Keep a text, or a beginning that several share, in the place of others if it takes that.

        Raises:
            OSError: its file cannot be written; the text is dropped.
        """
        with self._lock:
            self._put(tokens, state, shared=shared)

    def _put(self, tokens: IntArray, state: mmap, *, shared: bool) -> None:
        for outgrown in [text for text in self._texts if _is_outgrown(text, tokens)]:
            self._remove(outgrown)
        if len(state) > self._most_bytes:
            return
        n_dropped = 0
        while self._texts and self._n_bytes() + len(state) > self._most_bytes:
            least = min(self._texts, key=lambda text: text.worth)
            self._age = least.worth
            self._remove(least)
            n_dropped += 1
        text = StoredText(tokens, self._written(state), len(state), shared)
        self._appraise(text)
        self._texts.append(text)
        self._count(moved_out=1, dropped=n_dropped)

    def find(self, wanted: IntArray) -> StoredText | None:
        """The longest text that the wanted one begins with, but for its last token; it stays."""
        with self._lock:
            found = [text for text in self._texts if _is_beginning(text.tokens, wanted[:-1])]
        return max(found, key=lambda text: text.n_tokens, default=None)

    def most_common(self, wanted: IntArray) -> int:
        """How many tokens the wanted text has in common with the one that begins most like it."""
        with self._lock:
            return max((n_common(text.tokens, wanted) for text in self._texts), default=0)

    def note_use(self, text: StoredText) -> None:
        """A text came back into a place: it is worth more."""
        with self._lock:
            text.uses += 1
            self._appraise(text)
            self._count(moved_in=1)

    def _appraise(self, text: StoredText) -> None:
        text.worth = self._age + (text.uses + 1) * text.n_tokens / text.n_bytes

    def _written(self, state: mmap) -> mmap | Path:
        if self._folder is None:
            return state
        path = Path(self._folder.name) / f"{next(self._numbers)}.state"
        try:
            path.write_bytes(state)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return path

    def _remove(self, text: StoredText) -> None:
        self._texts.remove(text)
        if isinstance(text.state, Path):
            with contextlib.suppress(OSError):
                text.state.unlink()

    def _n_bytes(self) -> int:
        return sum(text.n_bytes for text in self._texts)

    def _count(self, *, moved_out: int = 0, moved_in: int = 0, dropped: int = 0) -> None:
        counts = self.counts
        self.counts = replace(
            counts,
            texts=len(self._texts),
            bytes=self._n_bytes(),
            moved_out=counts.moved_out + moved_out,
            moved_in=counts.moved_in + moved_in,
            dropped=counts.dropped + dropped,
        )


def _is_beginning(tokens: IntArray, of: IntArray) -> bool:
    return n_common(tokens, of) == len(tokens)


def _is_outgrown(text: StoredText, tokens: IntArray) -> bool:
    """Whether this was the beginning of one text only, which is longer now."""
    return not text.shared and _is_beginning(text.tokens, tokens)
