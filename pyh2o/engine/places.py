"""Who has which place, and what stays in it when its text has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import PyH2OError
from .place import Place
from .store import StoredText, TextStore


class Places:
    """Places of texts: some are taken, the others hold texts that have ended.

    Attributes:
        store: texts that have no place any more.
    """

    def __init__(self, places: Sequence[Place], store_bytes: int) -> None:
        """All are free, and the store may take so many bytes."""
        self.store = TextStore(store_bytes)
        self._places = list(places)
        self._free = list(places)  # the one that has been free for longest first

    @property
    def n_taken(self) -> int:
        """Places that are taken."""
        return len(self._places) - len(self._free)

    def any_free(self) -> bool:
        """Whether one can be taken."""
        return bool(self._free)

    def give_back(self, place: Place) -> None:
        """A text has ended; it stays there for a while."""
        self._free.append(place)

    def take(self, tokens: Sequence[int]) -> Place:
        """The place for a text that begins so; there is a free one.

        It is the one where most of these tokens can stay, or one that gets a stored text of which
        more can stay. Else it is an empty one, or that of the text that ended first.
        """
        wanted = np.asarray(tokens, dtype=np.intc)
        place, n_there = self._best(wanted)
        stored = self.store.find(wanted)
        if stored is not None and stored.n_tokens > n_there:
            place, n_there = self._emptiest(), 0
        elif n_there == 0:
            place = self._emptiest()
        self._free.remove(place)
        if n_there == 0:
            self._move_out(place)
        if stored is not None and stored.n_tokens > n_there:
            self._move_in(place, stored)
        return place

    def _best(self, wanted: npt.NDArray[np.intc]) -> tuple[Place, int]:
        lengths = [place.n_to_go_on(wanted) for place in self._free]
        best = int(np.argmax(lengths))
        return self._free[best], lengths[best]

    def _emptiest(self) -> Place:
        """An empty place, the first for one batch's sequences to lie together, or the oldest."""
        empty = [place for place in self._free if place.n_tokens == 0]
        return min(empty, key=lambda place: place.seq_id) if empty else self._free[0]

    def _move_out(self, place: Place) -> None:
        """Keep the text of a place that another one gets."""
        kv = place.kv
        if place.n_tokens and self.store.takes(kv.bytes_total + kv.bytes_archive):
            # an evaluation that was broken off may have left no whole text
            with contextlib.suppress(PyH2OError):
                self.store.put(place.input_ids[: place.n_tokens].copy(), place.kv_state())
        place.reset()

    def _move_in(self, place: Place, stored: StoredText) -> None:
        try:
            place.load_kv_state(stored.state, stored.tokens)
            self.store.note_use(stored)
        except PyH2OError:  # then it is read again
            place.reset()
