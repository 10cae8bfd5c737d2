"""Copies of what a model's cache held, from which a text that goes back is there again at once.

A copy is a state of the cache (`Llama.kv_state`) and the tokens that it is of. What comes back from
it is bit for bit what was there (with sliding windows to rounding), archive of recall included: a
state refers to the pages of the archive's file, or has them itself where the archive is in memory.
A file that goes on otherwise loses the pages of the other text. A copy that needs such pages is
noticed when it is loaded, by tokens that the archive lacks, and is not used: the text is read again
then.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING

import numpy as np

from ..core.beginnings import n_common
from ..errors import SettingsError, StateError

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
        reaches: as many tokens as the text has to keep when its end is removed.
        n_archived: tokens in the archive of recall.
        is_start: whether a turn began here.
    """

    tokens: IntArray
    state: mmap
    reaches: int
    n_archived: int
    is_start: bool

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.state) + self.tokens.nbytes

    def begins(self, tokens: IntArray) -> bool:
        """Whether a text goes on from here."""
        return n_common(self.tokens, tokens) == len(self.tokens)

    def n_to_read(self, tokens: IntArray) -> int | None:
        """How many tokens of a text are not in it; None if the text cannot go on from it."""
        if self.begins(tokens):
            return len(tokens) - len(self.tokens)
        is_prefix = n_common(self.tokens, tokens) == len(tokens)
        return 0 if is_prefix and len(tokens) >= self.reaches else None


class CacheCopies:
    """Copies of the cache of a model within a limit of memory; the least useful ones go first.

    Attributes:
        mib: most MiB that they may take; 0 for none.
    """

    def __init__(self, llm: Text, mib: int) -> None:
        """None yet.

        Raises:
            SettingsError: `mib` is no count.
        """
        if isinstance(mib, bool) or not isinstance(mib, int) or mib < 0:
            raise SettingsError(
                f"copies_mib is {mib!r}: give a count of MiB, or 0 for no copies of the cache"
            )
        self._llm = llm
        self._copies: list[CacheCopy] = []  # in the order in which they were taken
        self.mib = mib
        self._limit = mib * 2**20

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def n_bytes(self) -> int:
        """Memory that they take."""
        return sum(copy.n_bytes for copy in self._copies)

    def clear(self) -> None:
        """Drop all of them."""
        self._copies.clear()

    # ---------------------------------------------------------------------------------------------
    # Taking
    # ---------------------------------------------------------------------------------------------

    def may_be_needed(self, n_new: int | None) -> bool:
        """Whether copies are taken, and the text may lose what it needs to go back to here.

        `n_new` tokens at most are evaluated before this is asked again; None for no limit.
        """
        return self.mib > 0 and cannot_go_back(self._llm.kv, n_new)

    def take(self, n_new: int | None = None, *, is_start: bool = False) -> None:
        """Copy what the cache holds, if that may be needed (as there) and is worth it.

        With `is_start` a turn begins here.
        """
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
        copy = CacheCopy(tokens, state, self._reach(), llm.kv.archived, is_start)
        if copy.n_bytes <= self._limit:
            self._make_room(copy)
            self._copies.append(copy)

    def _likely_bytes(self) -> int:
        """About what a copy takes: cells in use, and an archive that is in memory."""
        llm, kv = self._llm, self._llm.kv
        in_memory = llm.archive is not None and llm.archive.is_in_memory
        return kv.bytes_total * kv.used // kv.cells + (kv.bytes_archive if in_memory else 0)

    def _reach(self) -> int:
        """How far the end of the text that is in the cache can be removed."""
        llm = self._llm
        if not llm.evicting:
            return llm.n_tokens  # `may_be_needed`: there is a recurrent state
        lengths = range(1, llm.n_tokens)
        first = bisect.bisect_left(lengths, True, key=llm.can_remove_tail) + 1
        return min(llm.n_tokens, first + llm.kv.recent // 2)

    def _make_room(self, new: CacheCopy) -> None:
        """Drop copies until another one has room.

        First those of another text, which only an answer that fails needs. Then those from amid
        older turns, and then the oldest.
        """
        copies = [*self._copies, new]
        newest_turn = max((i for i, copy in enumerate(copies) if copy.is_start), default=0)
        newest = copies[newest_turn:]
        for copy in sorted(
            self._copies,
            key=lambda copy: (copy.begins(new.tokens), copy.is_start or copy in newest),
        ):
            if self.n_bytes + new.n_bytes <= self._limit:
                break
            self._copies.remove(copy)

    # ---------------------------------------------------------------------------------------------
    # Going back
    # ---------------------------------------------------------------------------------------------

    def n_to_read(self, tokens: Sequence[int] | IntArray) -> int:
        """How many tokens of a text have to be evaluated, once the best copy is there."""
        text = np.asarray(tokens, np.intc)
        counts = (copy.n_to_read(text) for copy in self._copies)
        return min((count for count in counts if count is not None), default=len(text))

    def load(self, tokens: Sequence[int]) -> bool:
        """Have a beginning of a text in the cache; the rest of it is to be evaluated.

        A copy that ends a few tokens before comes first: it is exact, and where a longer one loses
        its end, that leaves a trace in the scores.

        Returns:
            False if there is no copy that can be used. What is in the cache is then of no use.
        """
        text = np.asarray(tokens, np.intc)
        found = [(copy.n_to_read(text), copy) for copy in self._copies]
        fitting = [(count, copy) for count, copy in found if count is not None]
        for _, copy in sorted(
            fitting,
            key=lambda one: (one[0] >= WORTH, max(0, len(one[1].tokens) - len(text)), one[0]),
        ):
            if self._restore(copy, len(text)):
                return True
            self._copies.remove(copy)
        return False

    def _restore(self, copy: CacheCopy, n_tokens: int) -> bool:
        """Have the cache hold what a copy has of the first tokens; whether that was possible."""
        llm = self._llm
        try:
            llm.load_kv_state(copy.state, copy.tokens)
        except (StateError, MemoryError):
            return False
        n_kept = min(n_tokens, len(copy.tokens))
        return llm.kv.archived == copy.n_archived and llm.remove_tail(n_kept)
