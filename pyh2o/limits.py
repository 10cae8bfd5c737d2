"""Limits of one request to the server."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BODY_MIB = 4
DEFAULT_WINDOWS = 8
DEFAULT_WAIT_SECONDS = 600
# Slots of the engine, and maximum MiB of snapshots of texts without a slot.
DEFAULT_TEXTS = 4
DEFAULT_STORE_MIB = 1024
# Interval for polling whether a slot is free and whether the client is still connected.
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """Limits and defaults of a request.

    Attributes:
        prompt_tokens: maximum length of the prompt; None for DEFAULT_WINDOWS times the window.
        reasoning_budget: default limit of reasoning tokens; None for no limit.
        thinks: whether models reason by default, where reasoning can be turned off.
    """

    body_mib: int = DEFAULT_BODY_MIB
    prompt_tokens: int | None = None
    wait_seconds: float = DEFAULT_WAIT_SECONDS
    waiting: int = 64
    reasoning_budget: int | None = None
    thinks: bool = True

    def prompt_limit(self, window: int) -> int:
        """Return the maximum prompt length, in tokens, for a model with this window."""
        return DEFAULT_WINDOWS * window if self.prompt_tokens is None else self.prompt_tokens
