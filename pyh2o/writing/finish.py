"""Why a text ended, in the words of results, records and session files."""

from __future__ import annotations

FINISH_STOP = "stop"
"""The model ended its text, or a stop string came."""
FINISH_LENGTH = "length"
"""There are as many tokens as were asked for, or a full cache that does not evict is full."""
FINISH_TRAINED_CONTEXT = "trained_context"
"""All positions the model was trained for are used up."""
FINISH_INTERRUPTED = "interrupted"
"""The reader wanted no more."""
FINISH_TOOL_CALLS = "tool_calls"
"""The model called tools, and waits for their results."""
FINISH_UNTIL = "until"
"""A text came that the story should end before."""
FINISH_REPETITION = "repetition"
"""A story fell into one loop after another, or an answer did nothing but repeat itself."""


def finish_without_room(evicting: bool) -> str:
    """Why a text ended for which there are no positions left."""
    return FINISH_TRAINED_CONTEXT if evicting else FINISH_LENGTH
