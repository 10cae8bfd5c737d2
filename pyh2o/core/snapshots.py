"""Snapshots of the caches of texts that have no slot, in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from mmap import mmap

import numpy as np
import numpy.typing as npt

from .tokens import n_common

IntArray = npt.NDArray[np.intc]


@dataclass(eq=False)
class Snapshot:
    """A text and the state of its cache after its last token.

    Attributes:
        tokens: [n_tokens]
        prompt: tokens without dropped spans, to match prompts against.
        state: from `Text.kv_state`.
        shared: whether it is a prefix of several texts.
        is_prompt: whether it is a prompt without an answer, which may be sent again.
        worth: the snapshot with the lowest value is evicted first.
        uses: how often it was restored.
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
    """Counters of a SnapshotStore.

    Attributes:
        texts, bytes: number and size of the snapshots now.
        moved_out: snapshots stored so far.
        moved_in: snapshots restored into a slot so far.
        dropped: snapshots evicted for others so far.
    """

    texts: int = 0
    bytes: int = 0
    moved_out: int = 0
    moved_in: int = 0
    dropped: int = 0


class SnapshotStore:
    """Snapshots of limited total size; those that save most tokens per byte are kept.

    The policy is GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy", 1998): worth is uses x tokens / bytes, plus the
    worth of the snapshot evicted last, which ages snapshots that were used often but long ago.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._texts: list[Snapshot] = []
        self._age = 0.0
        self._n_out = self._n_in = self._n_dropped = 0
        # one thread may assign a slot while another stores a shared prefix
        self._lock = threading.Lock()

    @property
    def counts(self) -> StoreCounts:
        """The present counters."""
        with self._lock:
            n_bytes = self._n_bytes()
            return StoreCounts(len(self._texts), n_bytes, self._n_out, self._n_in, self._n_dropped)

    def close(self) -> None:
        """Delete all snapshots."""
        with self._lock:
            self._texts.clear()

    def takes(self, n_bytes: int) -> bool:
        """Return whether a snapshot of this size can be stored at all."""
        return 0 < n_bytes <= self._most_bytes

    def put(self, stored: Snapshot) -> None:
        """Store a snapshot, and evict others if necessary.

        Snapshots of prefixes of it are deleted, except shared ones. Prompts replace only prompts.
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
        """Return the longest snapshot that is a prefix of a prompt without its last token."""
        with self._lock:
            found = [text for text in self._texts if _is_prefix(text.prompt, wanted[:-1])]
        return max(found, key=lambda text: len(text.prompt), default=None)

    def most_common(self, wanted: IntArray) -> int:
        """Return the length of the longest common prefix of a prompt and any snapshot."""
        with self._lock:
            return max((n_common(text.prompt, wanted) for text in self._texts), default=0)

    def record_use(self, text: Snapshot) -> None:
        """Count that a snapshot was restored, which raises its worth."""
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
