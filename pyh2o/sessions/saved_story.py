"""What the header of a story's session file says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..writing.finish import (
    FINISH_INTERRUPTED,
    FINISH_LENGTH,
    FINISH_REPETITION,
    FINISH_STOP,
    FINISH_TRAINED_CONTEXT,
    FINISH_UNTIL,
)
from ..writing.sampling import Sampling
from .identity import ModelIdentity, Settings, check_settings
from .pins import check_pins
from .records import Count, Seconds, in_one_line, record_of
from .session_file import damage_found, read_overview

KIND = "story"
FINISHES = (
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_UNTIL,
    FINISH_REPETITION,
    FINISH_TRAINED_CONTEXT,
    FINISH_INTERRUPTED,
    None,
)


@dataclass(frozen=True)
class SavedStory:
    """The header.

    Attributes:
        model, settings: what the state of the cache depends on.
        prompt_tokens: how many of the tokens are the prompt's.
        cached: how many the state of the cache covers.
        opening: text that comes before that of the story's tokens.
        text_bytes: given out so far.
        held: what TextPieces holds back, in hexadecimal digits.
        unsearched: see TextPieces.
        finish, sampling, until, seconds: as in the story.
        ended: whether the model ended its text after the last token.
        loop_guard, ignore_eos: as the story was begun.
        pins: spans that are never evicted.
        notes: of whoever wrote the story.
        archive: which file beside the session is its archive's; None if it has none.

    Raises:
        ValueError: they make no sense.
    """

    model: ModelIdentity
    settings: Settings
    prompt_tokens: Count
    cached: Count
    opening: str
    text_bytes: Count
    held: str
    unsearched: Count
    finish: str | None
    ended: bool
    sampling: Sampling
    until: list[str]
    loop_guard: bool
    ignore_eos: bool
    seconds: Seconds
    pins: tuple[tuple[Count, Count], ...]
    notes: dict[str, Any]
    archive: str | None

    def __post_init__(self) -> None:
        check_settings(self.settings)
        if self.finish not in FINISHES:
            raise ValueError(f"its finish is {in_one_line(ascii(self.finish))}")
        check_pins(self.pins)
        held = bytes.fromhex(self.held)
        if self.unsearched > len(held):
            raise ValueError(f"its unsearched is {self.unsearched}")
        held[: self.unsearched].decode()
        for text in (self.opening, *self.until):
            text.encode()

    def check_text(self, tokens: list[int], written: bytes) -> None:
        """Compare the header with the text.

        Args:
            tokens: of the prompt and of the story.
            written: the bytes of the story's tokens.

        Raises:
            ValueError: they do not belong together.
        """
        if not 0 < self.prompt_tokens <= len(tokens):
            raise ValueError(f"its prompt_tokens is {self.prompt_tokens}")
        if self.pins and self.pins[-1][1] > len(tokens):
            raise ValueError("its pins are not in its text")
        if self.cached > len(tokens):
            raise ValueError(f"it has {len(tokens)} tokens, of which {self.cached} are cached")
        whole, held = self.opening.encode() + written, bytes.fromhex(self.held)
        given = whole[: len(whole) - len(held)].decode(errors="ignore")
        if not whole.endswith(held) or len(given.encode()) != self.text_bytes:
            raise ValueError(f"its text_bytes is {self.text_bytes}, which its text has not")


def read_saved_story(path: str | Path) -> SavedStory:
    """Read the header of a story's session file, which is quick.

    Raises:
        SessionError: there is no such file, it is damaged, or of another kind.
    """
    header = read_overview(path, KIND).header
    with damage_found(path):
        return record_of(SavedStory, header)
