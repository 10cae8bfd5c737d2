"""Copies of what a model's cache held, from which a text that goes back is there again at once.

A copy is a state of the cache (`Llama.kv_state`) and the tokens that it is of. What comes back from
it is bit for bit what was there (with sliding windows to rounding), archive of recall included: a
state refers to the pages of the archive's file, or has them itself where the archive is in memory.
A file that goes on otherwise loses the pages of the other text. A copy that needs such pages is
noticed when it is loaded, by tokens that the archive lacks, and is not used: the text is read again
then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING

import numpy as np

from ..core.prefixes import n_common
from ..errors import StateError
from ..system.integers import check_count

if TYPE_CHECKING:
    from ..cache.kv_cache import IntArray
    from ..cache.statistics import KVStatistics
    from ..core.text import Text

DEFAULT_MIB = 512

# A copy takes the time in which a few tokens are read, and most are never needed: it is worth that
# where so many tokens or more would have to be read without it.
WORTH = 32

# Copies that are needed at one time: two of a turn, one of the answer that is drawn anew in case
# that fails, and one of an earlier turn. None is taken where so many do not fit.
AT_ONCE = 4


def cannot_go_back(kv: KVStatistics, n_new: int | None) -> bool:
    """Whether a text can no longer be truncated to its present length once more has come.

    It can be as long as nothing is evicted, unless it has a recurrent state, or a window that has
    moved on.

    Args:
        kv: the cache, before what comes.
        n_new: most tokens that come; None for no limit.
    """
    if kv.bytes_recurrent or not kv.evicting:
        return kv.bytes_recurrent > 0
    return n_new is None or kv.bytes_window > 0 or kv.used + n_new > kv.capacity


@dataclass(frozen=True, eq=False)  # two copies are never the same one
class CacheCopy:
    """What the cache held at one moment.

    Attributes:
        tokens: the text; [n_tokens].
        state: of the cache.
        n_archived: tokens in the archive of recall.
    """

    tokens: IntArray
    state: mmap
    n_archived: int

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.state) + self.tokens.nbytes

    def begins(self, tokens: IntArray) -> bool:
        """Whether a text goes on from here."""
        return n_common(self.tokens, tokens) == len(self.tokens)


class CacheCopies:
    """Copies of the cache of a model within a limit of memory; the oldest ones go first.

    Attributes:
        mib: most MiB that they may take; 0 for none.
    """

    def __init__(self, llm: Text, mib: int) -> None:
        """None yet.

        Raises:
            SettingsError: `mib` is no count.
        """
        cure = "give a count of MiB, or 0 for no copies of the cache"
        self.mib = check_count("copies_mib", mib, least=0, cure=cure)
        self._llm = llm
        self._copies: list[CacheCopy] = []  # in the order in which they were taken
        self._limit = self.mib * 2**20

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def n_bytes(self) -> int:
        """Memory that they take."""
        return sum(copy.n_bytes for copy in self._copies)

    def clear(self) -> None:
        """Drop all of them."""
        self._copies.clear()

    def may_be_needed(self, n_new: int | None) -> bool:
        """Whether copies are taken, and the text may lose what it needs to go back to here.

        `n_new` tokens at most are evaluated before this is asked again; None for no limit.
        """
        return self.mib > 0 and cannot_go_back(self._llm.kv, n_new)

    def take(self, n_new: int | None = None) -> None:
        """Copy what the cache holds, if that may be needed (as there) and is worth it."""
        llm = self._llm
        if not self.may_be_needed(n_new) or self._likely_bytes() > self._limit // AT_ONCE:
            return
        tokens = llm.tokens.copy()
        if self.n_to_read(tokens) < WORTH:
            return
        try:
            state = llm.kv_state()
        except (StateError, MemoryError):
            return
        copy = CacheCopy(tokens, state, llm.kv.archived)
        if copy.n_bytes > self._limit:
            return
        # those of another text, which only an answer that fails needs, go before older ones
        for old in sorted(self._copies, key=lambda old: old.begins(tokens)):
            if self.n_bytes + copy.n_bytes <= self._limit:
                break
            self._copies.remove(old)
        self._copies.append(copy)

    def _likely_bytes(self) -> int:
        """About what a copy takes: cells in use, and an archive that is in memory."""
        llm, kv = self._llm, self._llm.kv
        in_memory = llm.archive is not None and llm.archive.is_in_memory
        return kv.bytes_total * kv.used // kv.cells + (kv.bytes_archive if in_memory else 0)

    def _beginnings(self, tokens: Sequence[int] | IntArray) -> list[CacheCopy]:
        """Those that a text goes on from, the longest first."""
        text = np.asarray(tokens, np.intc)
        fitting = [copy for copy in self._copies if copy.begins(text)]
        return sorted(fitting, key=lambda copy: -len(copy.tokens))

    def n_to_read(self, tokens: Sequence[int] | IntArray) -> int:
        """How many tokens of a text have to be evaluated, once the best copy is there."""
        found = self._beginnings(tokens)
        return len(tokens) - (len(found[0].tokens) if found else 0)

    def load(self, tokens: Sequence[int]) -> bool:
        """Have a beginning of a text in the cache; the rest of it is to be evaluated.

        Returns:
            False if there is no copy that can be used. What is in the cache is then of no use.
        """
        for copy in self._beginnings(tokens):
            try:
                self._llm.load_kv_state(copy.state, copy.tokens)
                if self._llm.kv.archived == copy.n_archived:
                    return True
            except (StateError, MemoryError):
                pass
            self._copies.remove(copy)
        return False
