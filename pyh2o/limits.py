"""How much one request may ask for, before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BODY_MIB = 4
DEFAULT_WINDOWS = 8
DEFAULT_WAIT_SECONDS = 600
# Places for texts of a server's engine, and most MiB of texts without a place.
DEFAULT_TEXTS = 4
DEFAULT_STORE_MIB = 1024
# Between two looks at whether what is waited for is there, or still wanted.
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """What a request may take of the server.

    Attributes:
        body_mib: most MiB of a request's body.
        prompt_tokens: most tokens of a prompt; None for DEFAULT_WINDOWS times the window.
        wait_seconds: longest wait for a place, while others have all of them.
        waiting: most requests that wait at once.
        reasoning_budget: most tokens of thoughts, unless a request says otherwise; None for any
            number.
        thinks: whether models think that can be told not to, unless a request says otherwise.
    """

    body_mib: int = DEFAULT_BODY_MIB
    prompt_tokens: int | None = None
    wait_seconds: float = DEFAULT_WAIT_SECONDS
    waiting: int = 64
    reasoning_budget: int | None = None
    thinks: bool = True

    def prompt_limit(self, window: int) -> int:
        """Most tokens of a prompt, for a model with this window."""
        return DEFAULT_WINDOWS * window if self.prompt_tokens is None else self.prompt_tokens
