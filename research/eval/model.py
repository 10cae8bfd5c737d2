"""Facts about a model before a cache is made for it, and texts as its tokens."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics

from pyh2o.cache.settings import MIN_WINDOW
from pyh2o.compat.llama import Llama
from pyh2o.errors import ModelError, SettingsError
from pyh2o.models.gguf_file import files_of

from .caches import FULL_CACHE, Compute, open_llama


@dataclass(frozen=True)
class ModelFacts:
    """A model file.

    Attributes:
        path: of the file.
        n_ctx_train: trained context.
        weight_bytes: all tensors (llama_model_size).
        n_params: their elements.
        file_bytes: of all files of the model.
    """

    path: Path
    n_ctx_train: int
    weight_bytes: int
    n_params: int
    file_bytes: int


def open_for_tokens(model: Path) -> Llama:
    """Open the model without a cache, to tokenise and to read its metadata.

    Raises:
        ModelError: the file is missing or not a model.
    """
    # llama.cpp warns of sliding windows that it caches in full.
    settings = {"evict": False, "swa_full": False}
    return open_llama(model, FULL_CACHE, window=MIN_WINDOW, compute=Compute(threads=1), **settings)


def trained_context(llm: Llama) -> int:
    """Return the trained context."""
    n: int = llm._model.n_ctx_train()
    return n


def read_model(path: Path) -> ModelFacts:
    """Return the model's facts.

    Raises:
        ModelError: the file is missing or not a model, or has no trained context.
    """
    with open_for_tokens(path) as llm:
        model = llm._model
        if trained_context(llm) <= 0:
            raise ModelError(f"{path} has no trained context: give another file")
        file_bytes = sum(file.stat().st_size for file in files_of(path))
        return ModelFacts(path, trained_context(llm), model.size(), model.n_params(), file_bytes)


# -------------------------------------------------------------------------------------------------
# Texts
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedText:
    """A text.

    Attributes:
        name: for tables.
        text: as it is read.
    """

    name: str
    text: str

    @cached_property
    def digest(self) -> str:
        """Distinguishes it from another text of that name."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def normalised(text: str) -> str:
    """Return one line per paragraph, with empty lines between them.

    Books are often wrapped at 70 characters, which no model was trained to expect.
    """
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def english_text() -> str:
    """Return a long text that every Python has: its own documentation."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def text_tokens(llm: Llama, text: NamedText, start: int, tokens: int) -> list[int]:
    """Return tokens [start, start + tokens) of a text, after BOS if the model uses one.

    Raises:
        SettingsError: the text is too short.
    """
    found = plain_tokens(llm, text.text)
    if len(found) < start + tokens:
        raise SettingsError(
            f"{text.name} has {len(found)} tokens, fewer than --start {start} and --tokens "
            f"{tokens} need: give a longer --text, or lower them"
        )
    return [*bos_tokens(llm), *found[start : start + tokens]]


def repeated_tokens(path: Path, text: str, tokens: int) -> tuple[int, ...]:
    """Return `n` tokens of a text, repeated if it is too short, after BOS.

    Raises:
        ModelError: the file is missing or not a model.
        ValueError: the text has no tokens.
    """
    with open_for_tokens(path) as llm:
        own, begun = plain_tokens(llm, text), bos_tokens(llm)
    if not own:
        raise ValueError("the text has no tokens")
    times = -(-tokens // len(own))
    return tuple([*begun, *own * times][:tokens])


def plain_tokens(llm: Llama, text: str) -> list[int]:
    """Return the tokens of a text without BOS; special tokens are not parsed."""
    tokens: list[int] = llm.tokenize(text.encode(), add_bos=False, special=False)
    return tokens


def bos_tokens(llm: Llama) -> list[int]:
    """Return the tokens that every text starts with for this model: BOS, or nothing."""
    bos = llm.token_bos()
    return [bos] if bos != -1 and llm._model.add_bos_token() else []
