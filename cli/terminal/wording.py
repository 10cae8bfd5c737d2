"""Numbers and texts as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pyh2o.cache.statistics import KVStatistics
from pyh2o.writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TOOL_CALLS,
    FINISH_TRAINED_CONTEXT,
    FINISH_UNTIL,
)

from .terminal import harmless

SHORT = 60
"""Characters of a text that are enough to recognise it."""


def entry(label: str, said: Iterable[str]) -> str:
    """Lines of a label and what is said of it."""
    return "".join(f"  {'' if n else label:14}{line}\n" for n, line in enumerate(said))


def count(number: int, thing: str) -> str:
    """So many things, in words."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def per_second(tokens: int, seconds: float) -> str:
    """A speed, or nothing where there is none."""
    return f"{tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else ""


def duration(seconds: float) -> str:
    """About how long something takes."""
    if seconds < 90:
        return count(max(1, round(seconds)), "second")
    return count(round(seconds / 60), "minute")


def shortened(text: str) -> str:
    """The beginning of a text, on one line; marks of pictures are long."""
    line = harmless(" ".join(re.sub("<picture:[0-9a-f]{64}>", "[picture] ", text).split()))
    return line if len(line) <= SHORT else f"{line[: SHORT - 3]}..."


def why_ended(finish: str, kv: KVStatistics) -> str:
    """A finish reason for a person; `kv` is the cache at the end."""
    if finish == FINISH_STOP:
        return "the model ended its text"
    if finish == FINISH_INTERRUPTED:
        return "stopped by Ctrl-C"
    if finish == FINISH_UNTIL:
        return "a text of --until came"
    if finish == FINISH_TOOL_CALLS:
        return "the model calls tools again and again"
    if finish == FINISH_REPETITION:
        return (
            "the model fell into one loop after another (a higher --temp or --repeat-penalty helps)"
        )
    if finish == FINISH_TRAINED_CONTEXT:
        return f"all {kv.position_limit:,} positions the model was trained for are used up"
    # The token written last has no position yet.
    if not kv.evicting and kv.position + 1 >= kv.window:
        return f"the window of {kv.window:,} tokens is full, and --no-evict drops nothing"
    return "the number of tokens asked for is reached"
