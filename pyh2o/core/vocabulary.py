"""Tokens of a vocabulary that mean something apart from their text."""

from __future__ import annotations

from llama_cpp.llama_cpp import (
    LLAMA_VOCAB_TYPE_NONE,
    llama_token,
    llama_tokenize,
    llama_vocab_bos,
    llama_vocab_get_add_bos,
    llama_vocab_p,
    llama_vocab_type,
)

from ..errors import ModelError


def check_vocabulary(vocab: llama_vocab_p, *, add_bos: bool = False) -> None:
    """Refuse what llama.cpp ends the process for: text, where a file has no vocabulary for it.

    Args:
        vocab: of the model.
        add_bos: whether the token is wanted that begins a text.

    Raises:
        ModelError: there is no vocabulary, or no such token.
    """
    if llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE:
        raise ModelError("the model's file has no vocabulary: use it with tokens, and without text")
    if add_bos and llama_vocab_get_add_bos(vocab) and llama_vocab_bos(vocab) < 0:
        raise ModelError(
            "the model's file wants a token before each text and does not say which: give "
            "add_bos=False, or tokens instead of text"
        )


def tokenize(vocab: llama_vocab_p, text: bytes, *, add_bos: bool, special: bool) -> list[int]:
    """The tokens of a text.

    Args:
        vocab: of the model.
        text: UTF-8.
        add_bos: begin with the token that begins a text, if the model has texts begin with one.
        special: take the text of special tokens for them.

    Raises:
        ModelError: there is no vocabulary, or no token that begins a text.
        RuntimeError: llama.cpp failed.
    """
    check_vocabulary(vocab, add_bos=add_bos)
    n_tokens = len(text) + 2  # hardly ever more
    for _ in range(2):
        tokens = (llama_token * n_tokens)()
        found = llama_tokenize(vocab, text, len(text), tokens, n_tokens, add_bos, special)
        if found >= 0:
            return list(tokens[:found])
        n_tokens = -found
    raise RuntimeError(f"llama.cpp cannot make tokens of {text!r}")
