"""Why a text ended, as a person is told."""

from __future__ import annotations

from pyh2o.cache.statistics import KVStatistics
from pyh2o.writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TRAINED_CONTEXT,
    FINISH_UNTIL,
)


def why_ended(finish: str, kv: KVStatistics) -> str:
    """A finish reason for a person; `kv` is the cache at the end."""
    if finish == FINISH_STOP:
        return "the model ended its text"
    if finish == FINISH_INTERRUPTED:
        return "stopped by Ctrl-C"
    if finish == FINISH_UNTIL:
        return "a text of --until came"
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
