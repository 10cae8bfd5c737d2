"""Slots: who has which, what stays there when a text has ended, and what texts share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..cache.statistics import KVStatistics
from ..core.prefixes import as_in_text, prefix_kept
from ..core.snapshots import IntArray, Snapshot, SnapshotStore
from ..core.text import Text
from ..core.tokens import n_common
from ..errors import PyH2OError
from ..writing.cache_copies import WORTH, cannot_go_back
from ..writing.events import Usage

# A beginning that several texts have is kept for the next ones if it has so many tokens.
MIN_SHARED = 64


@dataclass(frozen=True)
class SlotReport:
    """What a slot holds at one moment.

    Attributes:
        running: whether its text is being read or written.
        kv: its cache; `kv.position` is the length of the text in tokens.
        recalled: spans of evicted tokens that were retrieved: (start, end), end not included.
    """

    running: bool
    kv: KVStatistics
    recalled: tuple[tuple[int, int], ...]


class Slot:
    """One sequence of the model; it serves one text at a time, in one thread.

    Attributes:
        text: that it holds, which stays there until the slot is needed for another one.
        owner: whose text this is, if no other request may continue it.
        keeps_text: whether the owner's text is here; the owner sets it.
        prompt: the tokens that the text starts with.
        n_dropped: those of them that the client has left out of its prompt.
        shared_end: end of a prefix shared with other texts, of which a snapshot is to be taken; 0
            for none.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.owner: object | None = None
        self.keeps_text = False
        self.prompt: Sequence[int] = ()
        self.n_dropped = 0
        self._usage = Usage()
        self.shared_end = 0

    @property
    def usage(self) -> Usage:
        """Tokens of all texts that were here."""
        return replace(self._usage, sampled=self.text.n_sampled)

    def start(self) -> Usage:
        """Count the prompt that is read next; return its usage."""
        n_kept = min(prefix_kept(self.text, self.prompt), len(self.prompt) - 1)
        n_prompt = len(self.prompt) - self.n_dropped
        usage = Usage(n_prompt, max(0, n_kept - self.n_dropped), self.n_dropped)
        self._usage += usage
        return usage

    def report(self, *, running: bool) -> SlotReport:
        """Return what it holds, from any thread, after the current batch."""
        watched = self.text.watched(rows=False)
        return SlotReport(running, watched.kv, watched.recalled)

    def end(self) -> None:
        """Detach the callbacks of a text that has ended for now."""
        self.text.prompt_progress = self.text.while_reading = None
        self.text.model.batcher.leave(self.text.seq_id)
        if self.owner is None:
            self.leave_session()

    def leave_session(self) -> None:
        """Drop a text whose archive is a session's file: that belongs to the session."""
        text = self.text
        if text.archive is not None and text.archive.is_of_session:
            with text.lock:
                text.archive.leave()
                text.reset()


class Slots:
    """Slots: some are taken, the others hold texts that have ended.

    Attributes:
        all: the slots, in the order of their sequences.
        store: texts that have no slot any more, and beginnings that several texts share.
    """

    def __init__(self, slots: Sequence[Slot], store: SnapshotStore) -> None:
        """All are free."""
        self.store = store
        self.all = tuple(slots)
        self._free = list(slots)  # the one that has been free for longest first
        self._wanted: dict[Slot, IntArray] = {}  # what the text of a taken slot begins with

    @property
    def n_taken(self) -> int:
        """Places that are taken."""
        return len(self.all) - len(self._free)

    def is_taken(self, slot: Slot) -> bool:
        """Whether a text is read or written in a slot."""
        return slot not in self._free

    def give_back(self, slot: Slot) -> None:
        """A text has ended; it stays there for a while."""
        del self._wanted[slot]
        slot.shared_end = 0
        slot.text.pauses.clear()
        self._free.append(slot)

    def take(self, tokens: Sequence[int], n_new: int | None = 0) -> Slot:
        """The slot for a text that begins so; there is a free one.

        It is the one where most of these tokens can stay, or one that gets a stored text of which
        more can stay. Else it is an empty one, or that of the text that ended first. If other texts
        begin likewise, but none has left its state at that slot, this one will. And so it will
        near the end of these tokens, if what comes behind them evicts some that they need when they
        come again.

        Args:
            tokens: that the text begins with.
            n_new: most that come behind them; None for no limit.
        """
        wanted = np.asarray(tokens, dtype=np.intc)
        slot, n_there = self._best(wanted)
        stored = self.store.find(wanted)
        n_stored = 0 if stored is None else len(stored.prompt)
        if stored is not None and len(stored.prompt) <= n_there:
            stored = None
        if stored is not None or n_there == 0:
            slot = self._emptiest()
            self._move_out(slot)
        elif n_common(there := _prompt_of(slot), wanted[:-1]) < min(len(there), len(wanted) - 1):
            self._keep(slot)  # not another answer: a title, say, under the system prompt of a chat
        if stored is not None:
            n_there = self._move_in(slot, stored)
        self._free.remove(slot)
        n_gone = len(as_in_text(slot.text, tokens)) - len(tokens)
        n_end = slot.text.model.min_chunk  # fewer would be rounded otherwise than the first time
        n_shared = min(self._most_shared(wanted), len(wanted) - n_end)
        if n_shared >= n_there + MIN_SHARED:
            slot.shared_end = n_shared
            slot.text.pauses[n_shared + n_gone] = partial(self._keep_shared, slot)
        end = len(wanted) - n_end
        if end >= n_stored + WORTH and self._may_come_again(slot, end, n_there, n_new):
            keep = partial(self._keep, slot, is_prompt=True)
            slot.text.pauses.setdefault(end + n_gone, keep)
        self._wanted[slot] = wanted
        return slot

    def is_cached(self, tokens: Sequence[int], n_most: int) -> bool:
        """Whether no more than so many tokens of a text would have to be read, and it has room."""
        wanted = np.asarray(tokens, dtype=np.intc)
        stored = self.store.find(wanted)
        n_there = max(self._best(wanted)[1], 0 if stored is None else len(stored.prompt))
        has_room = len(tokens) < self.all[0].text.position_limit
        return has_room and len(tokens) - n_there <= n_most

    def _may_come_again(self, slot: Slot, end: int, n_there: int, n_new: int | None) -> bool:
        """Whether to store a prompt up to an end, for when it comes again."""
        n_more = None if n_new is None else end - n_there + n_new
        return end > n_there and n_new != 0 and cannot_go_back(slot.text.kv, n_more)

    def restore_prompt(self, slot: Slot) -> None:
        """Load the snapshot of a slot's prompt, if it has more of it than the slot."""
        wanted = np.asarray(slot.prompt, dtype=np.intc)
        stored = self.store.find(wanted)
        if stored is not None and len(stored.prompt) > prefix_kept(slot.text, wanted):
            self._move_in(slot, stored)

    def take_for(self, owner: object) -> Slot:
        """A slot for a text that nobody else goes on with; there is a free one.

        It is the one where the owner's text still is (`keeps_text`), or one that is empty now.
        """
        slot = next((slot for slot in self._free if slot.owner is owner), None)
        if slot is None:
            slot = self._emptiest()
            self._move_out(slot)
            slot.owner = owner
            slot.keeps_text = False
        self._free.remove(slot)
        self._wanted[slot] = np.empty(0, dtype=np.intc)
        return slot

    def move_out(self, owner: object) -> None:
        """Let the slot of an owner's text be empty, unless the text is read or written there."""
        for slot in self._free:
            if slot.owner is owner:
                self._move_out(slot)

    def _best(self, wanted: IntArray) -> tuple[Slot, int]:
        lengths = [
            prefix_kept(slot.text, wanted) if slot.owner is None else 0 for slot in self._free
        ]
        best = int(np.argmax(lengths))
        return self._free[best], lengths[best]

    def _emptiest(self) -> Slot:
        """An empty slot, the first for one batch's sequences to lie together, or the oldest."""
        empty = [slot for slot in self._free if slot.text.n_tokens == 0]
        return min(empty, key=lambda slot: slot.text.seq_id) if empty else self._free[0]

    def _most_shared(self, wanted: IntArray) -> int:
        """How many tokens this text and another one begin with."""
        others = [_prompt_of(slot) for slot in self._free if slot.owner is None]
        n = max((n_common(wanted, other) for other in others), default=0)
        # of those who read it now one is enough
        for slot, other in self._wanted.items():
            shared = n_common(wanted, other)
            if slot.shared_end != min(shared, len(other) - slot.text.model.min_chunk):
                n = max(n, shared)
        return max(n, self.store.most_common(wanted))

    def _move_out(self, slot: Slot) -> None:
        """Keep the text of a slot that another one gets; an owner keeps it elsewhere."""
        if slot.owner is None:
            self._keep(slot)
        slot.owner = None
        slot.leave_session()
        slot.text.reset()

    def _keep_shared(self, slot: Slot) -> None:
        slot.shared_end = 0
        self._keep(slot, shared=True)

    def _keep(self, slot: Slot, *, shared: bool = False, is_prompt: bool = False) -> None:
        """Store the text of a slot as it is now."""
        kv = slot.text.kv
        if slot.text.n_tokens and self.store.takes(kv.bytes_total + kv.bytes_archive):
            # an evaluation that was broken off may have left no whole text
            with contextlib.suppress(PyH2OError, MemoryError):
                tokens, state = slot.text.tokens.copy(), slot.text.kv_state()
                self.store.put(Snapshot(tokens, _prompt_of(slot), state, shared, is_prompt))

    def _move_in(self, slot: Slot, stored: Snapshot) -> int:
        """Give a slot the text; how many of its tokens are there now."""
        try:
            slot.text.load_kv_state(stored.state, stored.tokens)
        except (PyH2OError, MemoryError):  # then it is read again
            slot.text.reset()
            return 0
        except BaseException:  # Ctrl-C may have left a part of it
            slot.text.reset()
            raise
        self.store.record_use(stored)
        return len(stored.prompt)


def _prompt_of(slot: Slot) -> IntArray:
    """What a prompt that goes on from the text of a slot begins with."""
    tokens: IntArray = slot.text.tokens[slot.text.kept_positions]
    return tokens
