"""Tokens of a vocabulary that mean something apart from their text."""

from __future__ import annotations

from llama_cpp import Llama
from llama_cpp.llama_cpp import llama_vocab_is_eog


def is_end_token(llama: Llama, token: int) -> bool:
    """Whether a token means "end of text", or the end of an answer."""
    return bool(llama_vocab_is_eog(llama._model.vocab, token))


def end_tokens(llama: Llama) -> list[int]:
    """The tokens that mean "end of text"."""
    return [token for token in range(llama.n_vocab()) if is_end_token(llama, token)]
