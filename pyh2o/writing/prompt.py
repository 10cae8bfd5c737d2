"""The tokens of prompts: BOS, EOS, marks of a gap to fill; checks of their length."""

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
    """Return the marks before prefix, suffix and gap; None if the model cannot fill gaps."""
    native = model.native
    tokens = native.token_prefix(), native.token_suffix(), native.token_middle()
    return tokens if min(tokens) >= 0 else None


def prompt_tokens(
    model: Model, prompt: str | Sequence[int], suffix: str | None = None
) -> list[int]:
    """Return the tokens of a prompt, with BOS and EOS if the model's vocabulary requires them.

    A model that fills gaps also gets the suffix. A prompt of tokens without a suffix does not
    change.

    Raises:
        TextError: the prompt is not valid Unicode.
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
    """Return the tokens of a prompt for the text between two texts.

    Args:
        model: a model that fills gaps.
        before, after: the texts.
        files: names and texts of other files, which come first, with marks if the model has them.

    Raises:
        UnsupportedModelError: the model cannot fill gaps.
    """
    if infill_tokens(model) is None:
        raise UnsupportedModelError("the model cannot fill gaps: use a model for code completion")
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
    """Return the text of a prompt."""
    if isinstance(prompt, str):
        return prompt
    parts = detokenizer(model, [], starts_text=False)
    return detokenize(parts, prompt).decode(errors="ignore")


def check_room(text: Text, n_tokens: int) -> None:
    """Check that a text of `n_tokens` tokens leaves a position to sample a token.

    Raises:
        ContextLimitError: it does not.
    """
    if n_tokens >= text.position_limit:
        cure = (
            "the model was trained for no more positions: shorten the text, or start a new one"
            if text.evicting
            else "shorten the text, raise n_ctx (--ctx), or turn eviction on"
        )
        # programs such as llama_cpp's server recognise the error by its first words
        raise ContextLimitError(
            f"Requested tokens ({n_tokens}) exceed context window of {text.position_limit}: {cure}"
        )


def check_prompt(text: Text, tokens: Sequence[int]) -> None:
    """Check the length of a prompt, and warn of two BOS tokens.

    Raises:
        ValueError: the prompt has no tokens.
        ContextLimitError: it leaves no position to sample a token.
    """
    if not tokens:
        raise ValueError(
            "the prompt is empty and the model adds no BOS token: give at least one token"
        )
    check_room(text, len(tokens))
    bos = text.model.token_bos()
    if list(tokens[:2]) == [bos, bos]:
        warnings.warn(
            f"the prompt starts with two BOS tokens ({text.model.native.token_get_text(bos)}), "
            "which makes answers worse: the model adds one itself, so omit yours",
            RuntimeWarning,
            stacklevel=2,
        )


def _tokenize(model: Model, text: str, *, special: bool) -> list[int]:
    return model.tokenize(utf8(text), add_bos=False, special=special) if text else []


def _bos_tokens(model: Model) -> list[int]:
    bos = model.token_bos()
    return [bos] if bos != -1 and model.native.add_bos_token() else []


def _eos_tokens(model: Model) -> list[int]:
    """Return the end of a prompt, if the vocabulary has a separator or EOS after each text."""
    separator: int = model.native.token_sep()
    if separator != -1:
        return [separator]
    eos = model.native.token_eos()
    return [eos] if eos != -1 and model.native.add_eos_token() else []
