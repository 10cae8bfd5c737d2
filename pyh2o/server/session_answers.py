"""Answers and passages of sessions, sent as events while they are generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from ..cache.statistics import KVStatistics
from ..engine.slots import Slot
from ..sessions.conversation import Conversation
from ..sessions.story import Story
from ..writing.finish import FINISH_INTERRUPTED, FINISH_STOP
from ..writing.pieces import ReasoningText
from .answers import Events
from .open_session import OpenSession, StoppedError
from .served_model import ServedModel

# Minimum seconds between two events of reading, and between two of the cache.
READING_SECONDS = 0.1
KV_SECONDS = 1.0
# Shorter messages, in tokens, have no events of reading.
LONG_MESSAGE = 64


@dataclass
class Answering:
    """One answer of a session that the caller holds alone, in its slot."""

    session: OpenSession
    model: ServedModel
    slot: Slot
    events: Events

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._progress_sent = self._kv_sent = 0.0
        # Time of the first piece with the number of tokens, and time of the last piece.
        self._first: tuple[float, int] | None = None
        self._last = 0.0

    def run(self, start: Callable[[], Generator[str]]) -> dict[str, Any]:
        """Generate the answer and store it, also if it is cancelled.

        Args:
            start: returns the pieces of the text.

        Returns:
            the last event.
        """
        text = self.session.text
        turns = text.turns if isinstance(text, Conversation) else ()
        cache = self.slot.text
        cache.prompt_progress, cache.while_reading = self._on_read, self._check
        try:
            with suppress(StoppedError), closing(start()) as pieces:
                for piece in pieces:
                    self._on_piece(piece)
        finally:
            cache.prompt_progress = cache.while_reading = None
            # at shutdown, a message without an answer stays as it was recorded
            is_kept = isinstance(text, Story) or text.turns != turns
            if is_kept or not self.model.shutting_down:
                text.store()
        return self._end(turns)

    def _check(self) -> None:
        """Raise a StoppedError if the answer is cancelled; also from the batch thread."""
        self.model.check_open()
        if self.session.stopping or not self.events.is_connected:
            raise StoppedError

    def _on_read(self, done: int, of_all: int) -> None:
        self._check()
        now = time.monotonic()
        if of_all > LONG_MESSAGE and now - self._progress_sent >= READING_SECONDS:
            self._progress_sent = now
            self.events.offer({"type": "reading", "done": done, "of": of_all})
        self._send_kv(now)

    def _on_piece(self, piece: str) -> None:
        now = self._last = time.monotonic()
        self._first = self._first or (now, len(self.session.text.tokens))
        if piece:
            kind = "reasoning" if isinstance(piece, ReasoningText) else "text"
            self.events.send({"type": kind, "text": piece})
        self._send_kv(now)
        self._check()

    def _send_kv(self, now: float) -> None:
        if now - self._kv_sent >= KV_SECONDS:
            self._kv_sent = now
            kv = kv_numbers(self.slot.text.kv)
            self.events.offer({"type": "kv", "kv": kv, "tokens_per_second": self._speed()})

    def _speed(self) -> float | None:
        """Return tokens per second after the first piece; None before the second."""
        if self._first is None or self._last <= self._first[0]:
            return None
        started, n_tokens = self._first
        return round((len(self.session.text.tokens) - n_tokens) / (self._last - started), 2)

    def _end(self, turns: tuple[Any, ...]) -> dict[str, Any]:
        session, text = self.session, self.session.text
        session.recalled = recalled_of(self.slot)
        turn, finish = None, FINISH_INTERRUPTED if session.stopping else FINISH_STOP
        if isinstance(text, Story):
            finish = text.finish or FINISH_INTERRUPTED
        elif text.turns != turns:
            finish = text.turns[-1].finish
            attempts = [turn.attempt for turn in text.answers]
            turn = {**asdict(text.turns[-1]), "attempts": attempts}
        first = None if self._first is None else round(self._first[0] - self._started, 3)
        return {
            **NOT_STARTED,
            "turn": turn,
            "finish": finish,
            "kv": kv_numbers(self.slot.text.kv),
            "first_token_seconds": first,
            "tokens_per_second": self._speed(),
        }


# The last event of an answer that was cancelled while it waited for a slot.
NOT_STARTED: dict[str, Any] = {
    "type": "done",
    "turn": None,
    "finish": FINISH_INTERRUPTED,
    "kv": None,
    "first_token_seconds": None,
    "tokens_per_second": None,
}


def recalled_of(slot: Slot) -> list[dict[str, Any]]:
    """Return the evicted passages that the last answer in a slot retrieved."""
    return [
        {"start": each.start, "end": each.end, "text": each.text, "mass": each.weight}
        for each in slot.text.recalled()
    ]


def kv_numbers(kv: KVStatistics) -> dict[str, Any]:
    """Return the statistics of a cache that clients show."""
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
