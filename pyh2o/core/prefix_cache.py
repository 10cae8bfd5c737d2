"""Snapshots of the caches of texts, in memory: a text that starts like one continues from it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap

import numpy as np

from ..cache.kv_cache import IntArray
from ..limits import DEFAULT_STORE_MIB
from ..system.integers import check_count
from .tokens import n_common


@dataclass(eq=False)
class Snapshot:
    """A text and the state of its cache after its last token.

    Attributes:
        prompt: the tokens that a text must start with; of a request without dropped spans.
        state: from `Text.kv_state`.
        owner: the only object that may use it; None if any request may.
        shared: whether it is a prefix of several texts.
        is_prompt: whether it is a prompt without an answer, which may be sent again.
        worth: the snapshot with the lowest value is evicted first.
    """

    tokens: IntArray
    prompt: IntArray
    state: mmap
    n_archived: int
    owner: weakref.ref[object] | None = None
    shared: bool = False
    is_prompt: bool = False
    worth: float = 0.0
    uses: int = 0

    @property
    def n_bytes(self) -> int:
        return len(self.state) + self.tokens.nbytes


@dataclass(frozen=True)
class StoreCounts:
    """Counters of a PrefixCache.

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


class PrefixCache:
    """Snapshots of limited total size; those that save most tokens per byte are kept.

    The policy is GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy", 1998): worth is uses x tokens / bytes, plus the
    worth of the snapshot evicted last, which ages snapshots that were used often but long ago.
    The methods are thread-safe.
    """

    def __init__(self, mib: int = DEFAULT_STORE_MIB) -> None:
        cure = "give a number of MiB, or 0 for no snapshots"
        self.mib = check_count("store_mib", mib, least=0, cure=cure)
        self._snapshots: list[Snapshot] = []
        self._age = 0.0
        self._n_out = self._n_in = self._n_dropped = 0
        # one thread may assign a slot while another stores a shared prefix
        self._lock = threading.Lock()

    @property
    def max_bytes(self) -> int:
        return self.mib * 2**20

    @property
    def counts(self) -> StoreCounts:
        with self._lock:
            self._drop_orphans()
            n, n_bytes = len(self._snapshots), self._n_bytes()
            return StoreCounts(n, n_bytes, self._n_out, self._n_in, self._n_dropped)

    def clear(self, owner: object | None = None) -> None:
        """Delete the snapshots of an owner; None for all."""
        with self._lock:
            self._snapshots = [
                each for each in self._snapshots if owner is not None and not _is_of(each, owner)
            ]

    def discard(self, snapshot: Snapshot) -> None:
        """Delete a snapshot that cannot be restored."""
        with self._lock:
            if snapshot in self._snapshots:
                self._snapshots.remove(snapshot)

    def put(self, snapshot: Snapshot) -> None:
        """Store a snapshot, and evict others if necessary.

        Snapshots of prefixes of it are deleted, except shared ones and those of an owner, who may
        go back. Prompts replace only prompts. The first to be evicted are an owner's snapshots that
        are no prefix of the new one: the text was changed since.
        """
        owner = snapshot.owner and snapshot.owner()
        with self._lock:
            self._drop_orphans()
            self._snapshots = [
                each
                for each in self._snapshots
                if each.owner is not None
                or owner is not None
                or each.shared
                or (each.is_prompt and not snapshot.is_prompt)
                or not _is_prefix(each.prompt, snapshot.prompt)
            ]
            if snapshot.n_bytes > self.max_bytes:
                return

            def rank(each: Snapshot) -> tuple[bool, float]:
                is_stale = owner is not None and _is_of(each, owner)
                is_stale = is_stale and not _is_prefix(each.prompt, snapshot.prompt)
                return not is_stale, each.worth

            while self._n_bytes() + snapshot.n_bytes > self.max_bytes:
                least = min(self._snapshots, key=rank)
                self._age = max(self._age, least.worth)
                self._snapshots.remove(least)
                self._n_dropped += 1
            self._appraise(snapshot)
            self._snapshots.append(snapshot)
            self._n_out += 1

    def prefixes(
        self, tokens: Sequence[int] | IntArray, owner: object | None = None
    ) -> list[Snapshot]:
        """Return the snapshots that a text starts with, the longest first.

        Args:
            owner: whose snapshots; None for those that any request may use.
        """
        text = np.asarray(tokens, dtype=np.intc)
        with self._lock:
            found = [
                each
                for each in self._snapshots
                if _is_of(each, owner) and _is_prefix(each.prompt, text)
            ]
        return sorted(found, key=lambda each: -len(each.prompt))

    def most_common(self, tokens: IntArray) -> int:
        """Return the length of the longest common prefix of a prompt and any request's snapshot."""
        with self._lock:
            ours = [each.prompt for each in self._snapshots if each.owner is None]
            return max((n_common(prompt, tokens) for prompt in ours), default=0)

    def record_use(self, snapshot: Snapshot) -> None:
        """Count that a snapshot was restored, which raises its worth."""
        with self._lock:
            snapshot.uses += 1
            self._appraise(snapshot)
            self._n_in += 1

    def _appraise(self, snapshot: Snapshot) -> None:
        n_tokens = len(snapshot.prompt)
        snapshot.worth = self._age + (snapshot.uses + 1) * n_tokens / snapshot.n_bytes

    def _n_bytes(self) -> int:
        return sum(each.n_bytes for each in self._snapshots)

    def _drop_orphans(self) -> None:
        self._snapshots = [
            each for each in self._snapshots if each.owner is None or each.owner() is not None
        ]


def _is_of(snapshot: Snapshot, owner: object | None) -> bool:
    if snapshot.owner is None or owner is None:
        return snapshot.owner is owner
    return snapshot.owner() is owner


def _is_prefix(tokens: IntArray, of: IntArray) -> bool:
    return n_common(tokens, of) == len(tokens)
