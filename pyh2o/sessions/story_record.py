"""A story at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


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


def speed(tokens: int, seconds: float) -> float:
    """Tokens a second, as a record shows it."""
    return round(tokens / seconds, 2) if seconds > 0 else 0.0
