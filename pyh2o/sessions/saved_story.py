"""What the header of a story's session file says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from ..writing.finish import FINISH_UNTIL
from .records import Count, Seconds
from .session_header import SessionHeader
from .turns import ANSWER_FINISHES

KIND = "story"
FINISHES = (*ANSWER_FINISHES, FINISH_UNTIL)


@dataclass(frozen=True, kw_only=True)
class SavedStory(SessionHeader):
    """The header.

    Attributes:
        prompt_tokens: how many of the tokens are the prompt's.
        opening: text that comes before that of the story's tokens.
        text_bytes: given out so far.
        held: what TextPieces holds back, in hexadecimal digits.
        unsearched: see TextPieces.
        finish, until, seconds: as in the story.
        ended: whether the model ended its text after the last token.
        loop_guard, ignore_eos: as the story was begun.
        notes: of whoever wrote the story.
    """

    kind = KIND

    prompt_tokens: Count
    opening: str
    text_bytes: Count
    held: str
    unsearched: Count
    finish: Annotated[str, FINISHES] | None
    ended: bool
    until: list[str]
    loop_guard: bool
    ignore_eos: bool
    seconds: Seconds
    notes: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        held = bytes.fromhex(self.held)
        if self.unsearched > len(held):
            raise ValueError(f"its unsearched is {self.unsearched}")
        held[: self.unsearched].decode()
        for text in (self.opening, *self.until):
            text.encode()

    def check_tokens(self, tokens: Sequence[int]) -> None:
        super().check_tokens(tokens)
        if not 0 < self.prompt_tokens <= len(tokens):
            raise ValueError(f"its prompt_tokens is {self.prompt_tokens}")

    def check_text(self, written: bytes) -> None:
        """Compare the header with the bytes of the story's tokens.

        Raises:
            ValueError: they do not belong together.
        """
        whole, held = self.opening.encode() + written, bytes.fromhex(self.held)
        given = whole[: len(whole) - len(held)].decode(errors="ignore")
        if not whole.endswith(held) or len(given.encode()) != self.text_bytes:
            raise ValueError(f"its text_bytes is {self.text_bytes}, which its text has not")
