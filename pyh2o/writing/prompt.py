"""The tokens of a prompt: BOS and EOS where they belong, a gap to fill, its limits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import llama_cpp

from ..core.detokenizer import detokenize, detokenizer
from ..core.utf8 import utf8
from ..core.vocabulary import suffix_tokens
from ..errors import ContextLimitError, UnsupportedModelError

if TYPE_CHECKING:
    from ..core.model import Model
    from ..core.text import Text


def infill_tokens(model: Model) -> tuple[int, int, int] | None:
    """The marks before prefix, suffix and gap; None if the model was not made to fill gaps."""
    native = model.native
    tokens = native.token_prefix(), native.token_suffix(), native.token_middle()
    return tokens if min(tokens) >= 0 else None


def prompt_tokens(
    model: Model, prompt: str | Sequence[int], suffix: str | None = None
) -> list[int]:
    """Tokens to feed: the prompt, with BOS and EOS where the model's vocabulary asks for them.

    A model that fills gaps is shown the suffix too. A prompt of tokens without a suffix is taken
    as it is.

    Raises:
        TextError: the prompt is not Unicode.
    """
    infill = None if suffix is None else infill_tokens(model)
    if isinstance(prompt, str):
        tokens = _tokenize(model, prompt, special=infill is None)
    else:
        tokens = list(prompt)
        if suffix is None:
            return tokens
    if suffix is not None and infill is not None:
        before, after, gap = infill
        head, tail = [before, *tokens], [after, *suffix_tokens(model, suffix)]
        tokens = [*tail, *head, gap] if model.spm_infill else [*head, *tail, gap]
    return [*_bos_tokens(model), *tokens, *_eos_tokens(model)]


def infill_prompt(
    model: Model, before: str, after: str, files: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """Tokens to feed for what is between two texts.

    Args:
        model: fills gaps.
        before, after: the texts.
        files: the names and texts of others, which come first; with marks if the model has such.

    Raises:
        UnsupportedModelError: it was not made to fill gaps.
    """
    if infill_tokens(model) is None:
        raise UnsupportedModelError(
            "the model has no tokens for a gap to fill: take one that was made for code"
        )
    vocab = model.native.vocab
    of_all, of_each = llama_cpp.llama_vocab_fim_rep(vocab), llama_cpp.llama_vocab_fim_sep(vocab)
    first: list[int] = []
    if files and of_all >= 0:
        first += [of_all, *_tokenize(model, "project\n", special=False)]
    for name, text in files:
        head = f"{name}\n" if of_each >= 0 else f"\n\n--- {name} ---\n\n"
        first += [of_each] if of_each >= 0 else []
        first += _tokenize(model, f"{head}{text}\n", special=False)
    if files and of_each >= 0:
        first += [of_each, *_tokenize(model, "this file\n", special=False)]
    tokens = prompt_tokens(model, before, after)
    n_bos = len(_bos_tokens(model))
    return [*tokens[:n_bos], *first, *tokens[n_bos:]]


def prompt_text(model: Model, prompt: str | Sequence[int]) -> str:
    """The prompt as the user would read it."""
    if isinstance(prompt, str):
        return prompt
    parts = detokenizer(model, [], starts_text=False)
    return detokenize(parts, prompt).decode(errors="ignore")


def check_room(text: Text, n_tokens: int) -> None:
    """Refuse so many tokens where they leave no position to write at.

    Raises:
        ContextLimitError: they are all the positions there are, or more.
    """
    if n_tokens >= text.position_limit:
        cure = (
            "the model was trained for no more positions: shorten the text, or begin a new one"
            if text.evicting
            else "shorten the text, raise n_ctx (--ctx), or turn eviction on"
        )
        # Programs, such as llama_cpp's server, recognise the error by its first words.
        raise ContextLimitError(
            f"Requested tokens ({n_tokens}) exceed context window of {text.position_limit}: {cure}"
        )


def check_prompt(text: Text, tokens: Sequence[int]) -> None:
    """Refuse a prompt that is empty or leaves no position to write at; warn of two BOS tokens.

    Raises:
        ValueError: no tokens.
        ContextLimitError: they are all the positions there are, or more.
    """
    if not tokens:
        raise ValueError(
            "the prompt is empty and the model adds no BOS token: give a prompt of at least a token"
        )
    check_room(text, len(tokens))
    bos = text.model.token_bos()
    if list(tokens[:2]) == [bos, bos]:
        warnings.warn(
            f"the prompt begins with two BOS tokens ({text.model.native.token_get_text(bos)}), "
            "which makes answers worse: the model adds one itself, so leave yours out",
            RuntimeWarning,
            stacklevel=2,
        )


def _tokenize(model: Model, text: str, *, special: bool) -> list[int]:
    return model.tokenize(utf8(text), add_bos=False, special=special) if text else []


def _bos_tokens(model: Model) -> list[int]:
    bos = model.token_bos()
    return [bos] if bos != -1 and model.native.add_bos_token() else []


def _eos_tokens(model: Model) -> list[int]:
    """The end of a prompt, for vocabularies with a separator or an EOS after each text."""
    separator: int = model.native.token_sep()
    if separator != -1:
        return [separator]
    eos = model.native.token_eos()
    return [eos] if eos != -1 and model.native.add_eos_token() else []
