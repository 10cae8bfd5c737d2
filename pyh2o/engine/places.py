"""Places of texts: who has which, what stays there when a text has ended, and what texts share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..cache.statistics import KVStatistics
from ..compat.llama import Llama
from ..core.beginnings import as_in_text, n_common, prefix_kept
from ..core.store import IntArray, StoredText, TextStore
from ..errors import PyH2OError, SettingsError
from ..writing.cache_copies import WORTH, cannot_go_back

# A beginning that several texts have is kept for the next ones if it has so many tokens.
LEAST_SHARED = 64


@dataclass(frozen=True)
class TextCounts:
    """What texts have taken so far.

    Attributes:
        prompt_tokens: of all prompts.
        cached_tokens: those of them that were in the cache, and were not read again.
        drawn_tokens: that were drawn, with those that ended a text.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    drawn_tokens: int = 0

    def __add__(self, other: TextCounts) -> TextCounts:
        return TextCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class PlaceReport:
    """What a place holds at one moment.

    Attributes:
        running: whether its text is being read or written; else it has ended.
        kv: its cache; `kv.position` is the length of the text in tokens.
        recalled: spans of evicted tokens that were looked at: (start, end), end not included.
    """

    running: bool
    kv: KVStatistics
    recalled: tuple[tuple[int, int], ...]


class Place(Llama):
    """A `Llama` for a thread of its own, whose text is one of several of a model.

    Attributes:
        shared_end: where a beginning ends that other texts have, too, and that is to be stored; 0
            for nowhere.
        owner: whose text this is, if nobody else may go on with it.
        keeps_text: whether the owner's text is here; the owner sets it once that is so.
        prompt: the tokens that the text was to begin with.
        n_dropped: those of them that its client has dropped, and that count as none of the prompt.
    """

    shared_end = 0
    owner: object | None = None
    keeps_text = False
    prompt: Sequence[int] = ()
    n_dropped = 0
    _prompts = TextCounts()

    @property
    def counts(self) -> TextCounts:
        """Of all texts that were here so far."""
        return self._prompts + TextCounts(drawn_tokens=self.text.n_drawn)

    def begin_prompt(self, tokens: Sequence[int]) -> int:
        """Count a prompt that is completed next; how many of its tokens are in the cache."""
        n_kept = min(prefix_kept(self.text, tokens), len(tokens) - 1)
        n_cached = max(0, n_kept - self.n_dropped)
        self._prompts += TextCounts(len(tokens) - self.n_dropped, n_cached)
        return n_cached

    def report(self, *, running: bool) -> PlaceReport:
        """What this place holds, from any thread; waits for the batch in the making."""
        watched = self.text.watched(rows=False)
        return PlaceReport(running, watched.kv, watched.recalled)

    def end(self) -> None:
        """Its text has ended, for now."""
        self.text.prompt_progress = self.text.while_reading = None
        self.text.model.batcher.leave(self.text.seq_id)
        if self.owner is None:
            self.leave_session()

    def leave_session(self) -> None:
        """Drop a text whose archive lies beside a session: its file is that session's alone."""
        text = self.text
        if text.archive is not None and text.archive.is_of_session:
            with text.guard:
                text.archive.leave()
                text.reset()

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the context is that of other texts, too.

        Raises:
            SettingsError: always.
        """
        raise SettingsError("embeddings come from a `Llama` of their own (embedding=True)")


class Places:
    """Places of texts: some are taken, the others hold texts that have ended.

    Attributes:
        all: the places, in the order of their sequences.
        store: texts that have no place any more, and beginnings that several texts share.
    """

    def __init__(self, places: Sequence[Place], store: TextStore) -> None:
        """All are free."""
        self.store = store
        self.all = tuple(places)
        self._free = list(places)  # the one that has been free for longest first
        self._wanted: dict[Place, IntArray] = {}  # what the text of a taken place begins with

    @property
    def n_taken(self) -> int:
        """Places that are taken."""
        return len(self.all) - len(self._free)

    def is_taken(self, place: Place) -> bool:
        """Whether a text is read or written in a place."""
        return place not in self._free

    def give_back(self, place: Place) -> None:
        """A text has ended; it stays there for a while."""
        del self._wanted[place]
        place.shared_end = 0
        place.text.pauses.clear()
        self._free.append(place)

    def take(self, tokens: Sequence[int], n_new: int | None = 0) -> Place:
        """The place for a text that begins so; there is a free one.

        It is the one where most of these tokens can stay, or one that gets a stored text of which
        more can stay. Else it is an empty one, or that of the text that ended first. If other texts
        begin likewise, but none has left its state at that place, this one will. And so it will
        near the end of these tokens, if what comes behind them evicts some that they need when they
        come again.

        Args:
            tokens: that the text begins with.
            n_new: most that come behind them; None for no limit.
        """
        wanted = np.asarray(tokens, dtype=np.intc)
        place, n_there = self._best(wanted)
        stored = self.store.find(wanted)
        n_stored = 0 if stored is None else len(stored.prompt)
        if stored is not None and len(stored.prompt) <= n_there:
            stored = None
        if stored is not None or n_there == 0:
            place = self._emptiest()
            self._move_out(place)
        elif n_common(there := _prompt_of(place), wanted[:-1]) < min(len(there), len(wanted) - 1):
            self._keep(place)  # not another answer: a title, say, under the system prompt of a chat
        if stored is not None:
            n_there = self._move_in(place, stored)
        self._free.remove(place)
        n_gone = len(as_in_text(place.text, tokens)) - len(tokens)
        n_end = place.text.model.least_piece  # fewer would be rounded otherwise than the first time
        n_shared = min(self._most_shared(wanted), len(wanted) - n_end)
        if n_shared >= n_there + LEAST_SHARED:
            place.shared_end = n_shared
            place.text.pauses[n_shared + n_gone] = partial(self._keep_shared, place)
        end = len(wanted) - n_end
        if end >= n_stored + WORTH and self._may_come_again(place, end, n_there, n_new):
            keep = partial(self._keep, place, is_prompt=True)
            place.text.pauses.setdefault(end + n_gone, keep)
        self._wanted[place] = wanted
        return place

    def is_there(self, tokens: Sequence[int], n_most: int) -> bool:
        """Whether no more than so many tokens of a text would have to be read, and it has room."""
        wanted = np.asarray(tokens, dtype=np.intc)
        stored = self.store.find(wanted)
        n_there = max(self._best(wanted)[1], 0 if stored is None else len(stored.prompt))
        has_room = len(tokens) < self.all[0].text.position_limit
        return has_room and len(tokens) - n_there <= n_most

    def _may_come_again(self, place: Place, end: int, n_there: int, n_new: int | None) -> bool:
        """Whether to store a prompt up to an end, for when it comes again."""
        n_more = None if n_new is None else end - n_there + n_new
        return end > n_there and n_new != 0 and cannot_go_back(place.kv, n_more)

    def take_for(self, owner: object) -> Place:
        """A place for a text that nobody else goes on with; there is a free one.

        It is the one where the owner's text still is (`keeps_text`), or one that is empty now.
        """
        place = next((place for place in self._free if place.owner is owner), None)
        if place is None:
            place = self._emptiest()
            self._move_out(place)
            place.owner = owner
            place.keeps_text = False
        self._free.remove(place)
        self._wanted[place] = np.empty(0, dtype=np.intc)
        return place

    def move_out(self, owner: object) -> None:
        """Let the place of an owner's text be empty, unless the text is read or written there."""
        for place in self._free:
            if place.owner is owner:
                self._move_out(place)

    def _best(self, wanted: IntArray) -> tuple[Place, int]:
        lengths = [
            prefix_kept(place.text, wanted) if place.owner is None else 0 for place in self._free
        ]
        best = int(np.argmax(lengths))
        return self._free[best], lengths[best]

    def _emptiest(self) -> Place:
        """An empty place, the first for one batch's sequences to lie together, or the oldest."""
        empty = [place for place in self._free if place.n_tokens == 0]
        return min(empty, key=lambda place: place.text.seq_id) if empty else self._free[0]

    def _most_shared(self, wanted: IntArray) -> int:
        """How many tokens this text and another one begin with."""
        others = [_prompt_of(place) for place in self._free if place.owner is None]
        n = max((n_common(wanted, other) for other in others), default=0)
        # of those who read it now one is enough
        for place, other in self._wanted.items():
            shared = n_common(wanted, other)
            if place.shared_end != min(shared, len(other) - place.text.model.least_piece):
                n = max(n, shared)
        return max(n, self.store.most_common(wanted))

    def _move_out(self, place: Place) -> None:
        """Keep the text of a place that another one gets; an owner keeps it elsewhere."""
        if place.owner is None:
            self._keep(place)
        place.owner = None
        place.leave_session()
        place.reset()

    def _keep_shared(self, place: Place) -> None:
        place.shared_end = 0
        self._keep(place, shared=True)

    def _keep(self, place: Place, *, shared: bool = False, is_prompt: bool = False) -> None:
        """Store the text of a place as it is now."""
        kv = place.kv
        if place.n_tokens and self.store.takes(kv.bytes_total + kv.bytes_archive):
            # an evaluation that was broken off may have left no whole text
            with contextlib.suppress(PyH2OError, MemoryError):
                tokens, state = place.text.tokens.copy(), place.text.kv_state()
                self.store.put(StoredText(tokens, _prompt_of(place), state, shared, is_prompt))

    def _move_in(self, place: Place, stored: StoredText) -> int:
        """Give a place the text; how many of its tokens are there now."""
        try:
            place.load_kv_state(stored.state, stored.tokens)
        except (PyH2OError, MemoryError):  # then it is read again
            place.reset()
            return 0
        except BaseException:  # Ctrl-C may have left a part of it
            place.reset()
            raise
        self.store.note_use(stored)
        return len(stored.prompt)


def _prompt_of(place: Place) -> IntArray:
    """What a prompt that goes on from the text of a place begins with."""
    tokens: IntArray = place.text.tokens[place.text.remembered]
    return tokens
