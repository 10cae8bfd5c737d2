"""Finish reasons, as in results, records and session files."""

from __future__ import annotations

FINISH_STOP = "stop"
"""The model ended its text, or sampled a stop string."""
FINISH_LENGTH = "length"
"""The maximum number of tokens was reached, or a full cache has no positions left."""
FINISH_TRAINED_CONTEXT = "trained_context"
"""No positions of the trained context are left."""
FINISH_INTERRUPTED = "interrupted"
"""The caller stopped it."""
FINISH_TOOL_CALLS = "tool_calls"
"""The model called tools and waits for results."""
FINISH_UNTIL = "until"
"""A stop text of a story was sampled."""
FINISH_REPETITION = "repetition"
"""A story repeated loops, or an answer only repeated itself."""


def finish_without_room(evicting: bool) -> str:
    """Return the finish reason of a text without positions left."""
    return FINISH_TRAINED_CONTEXT if evicting else FINISH_LENGTH
