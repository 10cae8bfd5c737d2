"""Texts as tokens of a vocabulary."""

from __future__ import annotations

from typing import Any, Protocol

from llama_cpp.llama_cpp import (
    LLAMA_TOKEN_ATTR_CONTROL,
    LLAMA_TOKEN_ATTR_USER_DEFINED,
    LLAMA_VOCAB_TYPE_NONE,
    LLAMA_VOCAB_TYPE_SPM,
    llama_token,
    llama_tokenize,
    llama_vocab_bos,
    llama_vocab_get_add_bos,
    llama_vocab_get_attr,
    llama_vocab_p,
    llama_vocab_type,
)

from ..errors import ModelError
from .utf8 import utf8


class HasVocabulary(Protocol):
    """A `Model`, as far as its vocabulary is concerned."""

    native: Any
    metadata: dict[str, str]
    tokenizer: Any
    chat: Any

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]: ...

    def token_bos(self) -> int: ...

    def is_end(self, token: int) -> bool: ...


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


def is_mark(model: HasVocabulary, token: int) -> bool:
    """Whether it is a control token or a user-defined one."""
    kinds = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED
    return token >= 0 and bool(llama_vocab_get_attr(model.native.vocab, token) & kinds)


def tokens_after(model: HasVocabulary, last: int, text: str, *, special: bool = True) -> list[int]:
    """Tokens of a text that follows the token `last`; -1 stands for any ordinary token."""
    is_sentencepiece = llama_vocab_type(model.native.vocab) == LLAMA_VOCAB_TYPE_SPM
    if not text or (is_sentencepiece and not is_mark(model, last)):
        return suffix_tokens(model, text, special=special)
    return model.tokenize(text.encode(), add_bos=False, special=special)


def suffix_tokens(model: HasVocabulary, suffix: str, *, special: bool = False) -> list[int]:
    """Tokens of a text that follows another one, without the space some tokenizers put first."""

    def tokenized(text: str) -> list[int]:
        return model.tokenize(utf8(text), add_bos=False, special=special) if text else []

    if model.metadata.get("tokenizer.ggml.add_space_prefix", "true") != "true" or not suffix:
        return tokenized(suffix)
    # That space goes to a sign put in front, whose tokens are then taken off again.
    sign = "\N{WHITE SMILING FACE}"
    return tokenized(sign + suffix)[len(tokenized(sign)) :]


def inert_tokens(model: HasVocabulary, last: int, text: str) -> list[int]:
    """Tokens of a text that follows the token `last`, none of them special."""
    tokens = tokens_after(model, last, text, special=False)
    inert = model.chat.inert
    # The tokenizer finds user-defined tokens in any text, but not in parts of their own.
    if inert.tokens.isdisjoint(tokens) or len(pieces := inert.cut(text)) == 1:
        return tokens
    tokens = []
    for piece in pieces:
        tokens += inert_tokens(model, tokens[-1] if tokens else last, piece)
    return tokens
