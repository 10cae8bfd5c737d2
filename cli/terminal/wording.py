"""Format numbers and texts for users."""

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
"""Maximum length of `shortened`."""


def entry(label: str, lines: Iterable[str]) -> str:
    return "".join(f"  {'' if n else label:14}{line}\n" for n, line in enumerate(lines))


def count(number: int, thing: str) -> str:
    """Return a number with a noun, such as "1 token" or "2 tokens"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def per_second(tokens: int, seconds: float) -> str:
    """Return a speed as text, or "" if it is undefined."""
    return f"{tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else ""


def duration(seconds: float) -> str:
    if seconds < 90:
        return count(max(1, round(seconds)), "second")
    return count(round(seconds / 60), "minute")


def shortened(text: str) -> str:
    """Return the start of a text on one line, with short marks of pictures."""
    line = harmless(" ".join(re.sub("<picture:[0-9a-f]{64}>", "[picture] ", text).split()))
    return line if len(line) <= SHORT else f"{line[: SHORT - 3]}..."


def why_ended(finish: str, kv: KVStatistics) -> str:
    if finish == FINISH_STOP:
        return "the model ended its text"
    if finish == FINISH_INTERRUPTED:
        return "stopped by Ctrl-C"
    if finish == FINISH_UNTIL:
        return "a text of --until was generated"
    if finish == FINISH_TOOL_CALLS:
        return "the model keeps calling tools"
    if finish == FINISH_REPETITION:
        return "the model keeps repeating itself (a higher --temp or --repeat-penalty helps)"
    if finish == FINISH_TRAINED_CONTEXT:
        return f"all {kv.position_limit:,} positions of the trained context are used"
    # the last token has no position yet
    if not kv.evicting and kv.position + 1 >= kv.window:
        return f"the window of {kv.window:,} tokens is full (--no-evict)"
    return "the maximum number of tokens is reached"
