"""Answers and passages of sessions, told event by event while they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any

from ..cache.statistics import KVStatistics
from ..engine.places import Place
from ..sessions.conversation import Conversation
from ..sessions.story import Story
from ..writing.finish import FINISH_INTERRUPTED, FINISH_STOP
from .answers import Events
from .open_session import OpenSession, StoppedError
from .served_model import ServedModel

# Between two events of the reading, between two looks at the cache, and between two events of it
# where nothing was compacted.
READING_SECONDS = 0.1
LOOK_SECONDS = 0.25
KV_SECONDS = 1.0
# A message of fewer tokens is read at once.
LONG_MESSAGE = 64


class Answering:
    """One answer while it is made, of a session that is in its place, and alone."""

    def __init__(
        self, session: OpenSession, model: ServedModel, place: Place, events: Events
    ) -> None:
        self._session = session
        self._model = model
        self._place = place
        self._events = events
        self._started = time.monotonic()
        self._progress_sent = self._next_look = self._kv_sent = 0.0
        self._compactions = place.kv.compactions
        self._times: list[float] = []  # of the first piece and the last one
        self._n_before = len(session.text.tokens)

    def run(self, begin: Callable[[], Generator[str]], n_to_read: int) -> dict[str, Any]:
        """Make it, and save what came of it.

        Whoever ends it, by leaving too, what was said is kept and saved.

        Args:
            begin: gives the text piece by piece.
            n_to_read: about how many tokens are read first.

        Returns:
            the last event.
        """
        text = self._session.text
        turns = text.turns if isinstance(text, Conversation) else ()
        if n_to_read > LONG_MESSAGE:
            self._send_progress(0, n_to_read)
        cache = self._place.text
        cache.prompt_progress, cache.while_reading = self._on_read, self._check
        try:
            with suppress(StoppedError), closing(begin()) as pieces:
                for piece in pieces:
                    self._on_piece(piece)
        finally:
            cache.prompt_progress = cache.while_reading = None
            self._session.save()
        return self._end(turns)

    def _check(self) -> None:
        """End it if it is not wanted any more; from the thread of the batches as well."""
        self._model.check_open()
        if self._session.stopping or not self._events.is_heard:
            raise StoppedError

    def _on_read(self, done: int, of_all: int) -> None:
        self._check()
        now = time.monotonic()
        if of_all > LONG_MESSAGE and now - self._progress_sent >= READING_SECONDS:
            self._send_progress(done, of_all)
        self._watch(now)

    def _send_progress(self, done: int, of_all: int) -> None:
        self._progress_sent = time.monotonic()
        seconds = self._progress_sent - self._started
        speed = done / seconds if done and seconds > 0 else None
        self._events.offer(
            {
                "type": "reading",
                "done": done,
                "of": of_all,
                "per_second": speed and round(speed, 2),
                "seconds_left": speed and round((of_all - done) / speed, 2),
            }
        )

    def _on_piece(self, piece: str) -> None:
        now = time.monotonic()
        self._times = [self._times[0] if self._times else now, now]
        if piece:
            self._events.send({"type": "text", "text": piece})
        self._watch(now)
        self._check()

    def _watch(self, now: float) -> None:
        """Look at the cache now and then, and tell its numbers."""
        if now < self._next_look:
            return
        kv = self._place.kv
        if kv.compactions == self._compactions and now - self._kv_sent < KV_SECONDS:
            return
        self._compactions = kv.compactions
        self._next_look = now + LOOK_SECONDS
        self._kv_sent = now
        self._events.offer({"type": "kv", "kv": kv_numbers(kv)})

    def _end(self, turns: tuple[Any, ...]) -> dict[str, Any]:
        session, text = self._session, self._session.text
        kv = self._place.kv
        session.recalled = recalled_of(self._place)
        turn, finish = None, FINISH_INTERRUPTED if session.stopping else FINISH_STOP
        if isinstance(text, Story):
            finish = text.finish or FINISH_INTERRUPTED
        elif text.turns != turns:
            finish = text.turns[-1].finish
            attempts = [turn.attempt for turn in text.answers]
            turn = {**asdict(text.turns[-1]), "attempts": attempts}
        now, times, n_drawn, speed = time.monotonic(), self._times, self._n_drawn(), None
        if times and n_drawn > 1 and times[1] > times[0]:
            speed = round((n_drawn - 1) / (times[1] - times[0]), 2)
        return {
            **never_begun(),
            "turn": turn,
            "finish": finish,
            "kv": {**kv_numbers(kv), "tokens_per_second": speed},
            "seconds": round(now - self._started, 3),
            "first_token_seconds": round(times[0] - self._started, 3) if times else None,
            "tokens_per_second": speed,
        }

    def _n_drawn(self) -> int:
        text, before = self._session.text, self._n_before
        if isinstance(text, Story):
            return max(0, len(text.tokens) - before)
        if not text.turns:
            return 0
        last = text.turns[-1]
        went_on = last.answer_start < before < last.end  # with an answer that was stopped before
        return last.end - (before if went_on else last.answer_start)


def never_begun() -> dict[str, Any]:
    """The last event of an answer that was stopped while it waited; nobody knows of its cache."""
    return {
        "type": "done",
        "turn": None,
        "finish": FINISH_INTERRUPTED,
        "kv": None,
        "seconds": 0.0,
        "first_token_seconds": None,
        "tokens_per_second": None,
    }


def recalled_of(place: Place) -> list[dict[str, Any]]:
    """The evicted passages that the last answer in a place has looked at."""
    return [
        {"start": each.start, "end": each.end, "text": each.text, "mass": each.weight}
        for each in place.recalled()
    ]


def kv_numbers(kv: KVStatistics) -> dict[str, Any]:
    """The numbers of a cache that a client shows."""
    return {
        "position": kv.position,
        "used": kv.used,
        "budget": kv.budget,
        "capacity": kv.capacity,
        "compactions": kv.compactions,
        "bytes": kv.bytes_total,
        "bytes_full": kv.bytes_full,
        "bytes_archive": kv.bytes_archive,
        "found_share": kv.found_share if kv.limits.recall else None,
    }
