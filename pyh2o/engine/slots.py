"""Slots and the prefix cache: which slot a request gets, and which prefixes are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..cache.kv_cache import IntArray
from ..cache.statistics import KVStatistics
from ..core.prefixes import (
    MIN_SAVED,
    as_in_text,
    cannot_go_back,
    prefix_kept,
    restore,
    take_snapshot,
)
from ..core.text import Text
from ..core.tokens import n_common
from ..writing.events import Usage

# Minimum tokens of a shared prefix to take a snapshot of it.
MIN_SHARED = 64


@dataclass(frozen=True)
class SlotReport:
    """State of a slot.

    Attributes:
        kv: statistics of the cache; `kv.position` is the length of the text in tokens.
        recalled: spans of evicted tokens that were retrieved: (start, end), end not included.
    """

    running: bool
    kv: KVStatistics
    recalled: tuple[tuple[int, int], ...]


class Slot:
    """One sequence of the model; it serves one text at a time, in one thread.

    Attributes:
        text: the text, which stays until another one needs the slot.
        owner: the only object that may continue the text; None if any request may.
        keeps_text: whether the owner's text is here; the owner sets it.
        n_dropped: number of prompt tokens that the client has dropped from its request.
        shared_end: end of a prefix shared with other texts, at which a snapshot is taken; 0 for
            none.
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
        """Tokens of all requests in this slot so far."""
        return replace(self._usage, sampled=self.text.n_sampled)

    def start(self) -> Usage:
        """Add the prompt to the usage; return the usage of the prompt."""
        n_kept = min(prefix_kept(self.text, self.prompt), len(self.prompt) - 1)
        n_prompt = len(self.prompt) - self.n_dropped
        usage = Usage(n_prompt, max(0, n_kept - self.n_dropped), self.n_dropped)
        self._usage += usage
        return usage

    def report(self, *, running: bool) -> SlotReport:
        """Return the state, from any thread, after the current batch."""
        watched = self.text.watched(rows=False)
        return SlotReport(running, watched.kv, watched.recalled)

    def end(self) -> None:
        """Detach the callbacks of a finished request."""
        self.text.prompt_progress = self.text.while_reading = None
        self.text.model.batcher.leave(self.text.seq_id)


class Slots:
    """All slots of an engine: some are taken, the others hold finished texts."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._snapshots = slots[0].text.model.snapshots
        self.all = tuple(slots)
        self._free = list(slots)  # longest free first
        self._prompts: dict[Slot, IntArray] = {}  # prompts of taken slots

    @property
    def n_taken(self) -> int:
        return len(self.all) - len(self._free)

    def is_taken(self, slot: Slot) -> bool:
        return slot not in self._free

    def give_back(self, slot: Slot) -> None:
        """Free a slot; its text stays until another one needs the slot."""
        del self._prompts[slot]
        slot.shared_end = 0
        slot.text.pauses.clear()
        self._free.append(slot)

    def take(self, tokens: Sequence[int], n_new: int | None = 0) -> Slot:
        """Take the best free slot for a prompt; at least one slot must be free.

        The best slot holds the longest reusable prefix of the prompt. If a snapshot has a longer
        one, it is restored into an empty slot, or into the one that has been free longest.
        Snapshots are scheduled at the end of a prefix shared with other texts, and near the end of
        the prompt if its answer may evict rows that the same prompt would need again.

        Args:
            n_new: maximum tokens after the prompt; None for no limit.
        """
        prompt = np.asarray(tokens, dtype=np.intc)
        slot, n_cached = self._best_slot(prompt)
        n_snapshot = self._n_stored(prompt)
        if n_snapshot > n_cached or n_cached == 0:
            slot = self._empty_slot()
            self._clear(slot)
        elif n_common(held := _prompt_of(slot), prompt[:-1]) < min(len(held), len(prompt) - 1):
            self._snapshot(slot)  # another text with the same prefix, such as the title of a chat
        if n_snapshot > n_cached:
            n_cached = restore(slot.text, prompt[:-1])
        self._free.remove(slot)
        n_dropped = len(as_in_text(slot.text, tokens)) - len(tokens)
        n_end = slot.text.model.min_chunk  # a shorter chunk would round differently
        n_shared = min(self._longest_shared(prompt), len(prompt) - n_end)
        if n_shared >= n_cached + MIN_SHARED:
            slot.shared_end = n_shared
            slot.text.pauses[n_shared + n_dropped] = partial(self._snapshot_shared, slot)
        end = len(prompt) - n_end
        if end >= n_snapshot + MIN_SAVED and self._may_evict(slot, end, n_cached, n_new):
            keep = partial(self._snapshot, slot, is_prompt=True)
            slot.text.pauses.setdefault(end + n_dropped, keep)
        self._prompts[slot] = prompt
        return slot

    def is_cached(self, tokens: Sequence[int], max_unread: int) -> bool:
        """Whether a prompt fits and at most `max_unread` of its tokens would have to be read."""
        prompt = np.asarray(tokens, dtype=np.intc)
        n_cached = max(self._best_slot(prompt)[1], self._n_stored(prompt))
        fits = len(tokens) < self.all[0].text.position_limit
        return fits and len(tokens) - n_cached <= max_unread

    def _may_evict(self, slot: Slot, end: int, n_cached: int, n_new: int | None) -> bool:
        """Whether the answer may evict rows that the prompt up to `end` would need again."""
        n_more = None if n_new is None else end - n_cached + n_new
        return end > n_cached and n_new != 0 and cannot_go_back(slot.text.kv, n_more)

    def restore_prompt(self, slot: Slot) -> None:
        """Restore the snapshot of a slot's prompt if it has a longer prefix than the slot."""
        prompt = np.asarray(slot.prompt, dtype=np.intc)
        restore(slot.text, prompt[:-1], least=prefix_kept(slot.text, prompt))

    def take_for(self, owner: object) -> Slot:
        """Take the slot with the owner's text (`keeps_text`), or an empty one; one must be free."""
        slot = next((slot for slot in self._free if slot.owner is owner), None)
        if slot is None:
            slot = self._empty_slot()
            self._clear(slot)
            slot.owner = owner
            slot.keeps_text = False
        self._free.remove(slot)
        self._prompts[slot] = np.empty(0, dtype=np.intc)
        return slot

    def move_out(self, owner: object) -> None:
        """Clear the slot of an owner's text unless the slot is taken."""
        for slot in self._free:
            if slot.owner is owner:
                self._clear(slot)

    def _best_slot(self, prompt: IntArray) -> tuple[Slot, int]:
        lengths = [
            prefix_kept(slot.text, prompt) if slot.owner is None else 0 for slot in self._free
        ]
        best = int(np.argmax(lengths))
        return self._free[best], lengths[best]

    def _empty_slot(self) -> Slot:
        """Return the first empty slot, or the one that has been free longest.

        The first one keeps the sequences of a batch contiguous.
        """
        empty = [slot for slot in self._free if slot.text.n_tokens == 0]
        return min(empty, key=lambda slot: slot.text.seq_id) if empty else self._free[0]

    def _longest_shared(self, prompt: IntArray) -> int:
        """Return the length of the longest prefix shared with another text."""
        others = [_prompt_of(slot) for slot in self._free if slot.owner is None]
        n = max((n_common(prompt, other) for other in others), default=0)
        # one of the slots that are reading the prefix takes the snapshot
        for slot, other in self._prompts.items():
            shared = n_common(prompt, other)
            if slot.shared_end != min(shared, len(other) - slot.text.model.min_chunk):
                n = max(n, shared)
        return max(n, self._snapshots.most_common(prompt))

    def _clear(self, slot: Slot) -> None:
        """Clear a slot, after a snapshot of its text; an owner has its own."""
        if slot.owner is None:
            self._snapshot(slot)
        slot.owner = None
        slot.text.reset()

    def _snapshot_shared(self, slot: Slot) -> None:
        slot.shared_end = 0
        self._snapshot(slot, shared=True)

    def _snapshot(self, slot: Slot, *, shared: bool = False, is_prompt: bool = False) -> None:
        take_snapshot(slot.text, _prompt_of(slot), shared=shared, is_prompt=is_prompt)

    def _n_stored(self, prompt: IntArray) -> int:
        """Return the length of the longest snapshot that a prompt without its last token has."""
        found = self._snapshots.prefixes(prompt[:-1])
        return len(found[0].prompt) if found else 0


def _prompt_of(slot: Slot) -> IntArray:
    """Return the tokens with which a prompt that continues the slot's text starts."""
    tokens: IntArray = slot.text.tokens[slot.text.kept_positions]
    return tokens
