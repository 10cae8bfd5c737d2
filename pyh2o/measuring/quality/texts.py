"""Texts as they are measured: without line breaks inside a paragraph, and as tokens."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from ...errors import SettingsError
from ...llama import Llama


@dataclass(frozen=True)
class EvalText:
    """A text.

    Attributes:
        name: for tables.
        text: normalised.
    """

    name: str
    text: str

    @property
    def sha256(self) -> str:
        """Tells it from another text of that name."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def normalised(text: str) -> str:
    """Paragraphs, which empty lines end, on a line each with an empty one between them.

    Books are often broken at 70 characters, which no model was trained to expect.
    """
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def text_tokens(llm: Llama, text: EvalText, start: int, tokens: int) -> list[int]:
    """Tokens [start, start + tokens) of a text, behind BOS if the model wants one.

    Raises:
        SettingsError: the text is too short.
    """
    found: list[int] = llm.tokenize(text.text.encode(), add_bos=False, special=False)
    if len(found) < start + tokens:
        raise SettingsError(
            f"{text.name} has {len(found)} tokens, fewer than --start {start} and --tokens "
            f"{tokens} need: give a longer --text, or lower them"
        )
    return [*bos_tokens(llm), *found[start : start + tokens]]


def bos_tokens(llm: Llama) -> list[int]:
    """What every text begins with for this model: BOS, or nothing."""
    bos = llm.token_bos()
    return [bos] if bos != -1 and llm._model.add_bos_token() else []
