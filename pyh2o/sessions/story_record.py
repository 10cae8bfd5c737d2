"""A story at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ..system.memory import resident_bytes

if TYPE_CHECKING:
    from .story import Story


@dataclass(frozen=True)
class StoryRecord:
    """A story at one moment, fit for JSON with `dataclasses.asdict`.

    Attributes:
        time: when, in UTC, as ISO 8601 has it.
        finish: why the writing has ended, or None while it goes on (see `Story.finish`).
        tokens: written so far.
        text_bytes: text given out so far, the opening included.
        seconds: it took to write them, without the reading of the prompt.
        tokens_per_second: since the record before.
        tokens_per_second_overall: since the story began.
        loops: broken so far.
        position: tokens of the prompt and of the story evaluated so far.
        cells_used, capacity: of the KV cache.
        tokens_evicted, compactions, rebases: so far.
        kv_bytes: the KV cache, with its scores.
        resident_bytes: memory of the process.
    """

    time: str
    finish: str | None
    tokens: int
    text_bytes: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_overall: float
    loops: int
    position: int
    cells_used: int
    capacity: int
    tokens_evicted: int
    compactions: int
    rebases: int
    kv_bytes: int
    resident_bytes: int

    @classmethod
    def of(cls, story: Story, text_bytes: int, *, since: tuple[int, float]) -> StoryRecord:
        """A story as it is now; `since` are tokens and seconds of the record before."""
        tokens, seconds = since
        kv = story.llm.kv
        return cls(
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            finish=story.finish,
            tokens=story.written,
            text_bytes=text_bytes,
            seconds=round(story.seconds, 3),
            tokens_per_second=_speed(story.written - tokens, story.seconds - seconds),
            tokens_per_second_overall=_speed(story.written, story.seconds),
            loops=story.loops,
            position=kv.position,
            cells_used=kv.used,
            capacity=kv.capacity,
            tokens_evicted=kv.tokens_evicted,
            compactions=kv.compactions,
            rebases=kv.rebases,
            kv_bytes=kv.bytes_total,
            resident_bytes=resident_bytes(),
        )


def _speed(tokens: int, seconds: float) -> float:
    """Tokens a second, as a record shows it."""
    return round(tokens / seconds, 2) if seconds > 0 else 0.0
