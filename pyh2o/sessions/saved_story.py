"""What the header of a story's session file says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SavedStory:
    """A story's own part of the header of its session file.

    `held` is what TextPieces holds back, in hexadecimal digits; `ended` is whether the model ended
    its text after the last token.
    """

    prompt_tokens: int
    evaluated: int
    opening: str
    text_bytes: int
    held: str
    unsearched: int
    finish: str | None
    ended: bool
    sampling: dict[str, Any]
    until: list[str]
    loop_guard: bool
    ignore_eos: bool
    seconds: float

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "evaluated", "text_bytes", "unsearched"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"its {name} is {value!r}")
