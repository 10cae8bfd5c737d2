"""Tokenize texts."""

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
    """Raise a ModelError without a vocabulary, or without a required BOS: llama.cpp would crash."""
    if llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE:
        raise ModelError("the model's file has no vocabulary: use tokens instead of text")
    if add_bos and llama_vocab_get_add_bos(vocab) and llama_vocab_bos(vocab) < 0:
        raise ModelError(
            "the model's file requires a BOS token but does not define it: use add_bos=False, or "
            "tokens instead of text"
        )


def tokenize(vocab: llama_vocab_p, text: bytes, *, add_bos: bool, special: bool) -> list[int]:
    """Return the tokens of a text.

    Args:
        add_bos: whether to add BOS if the model uses it.
        special: whether to parse the texts of special tokens.
    """
    check_vocabulary(vocab, add_bos=add_bos)
    n_tokens = len(text) + 2  # enough in nearly all cases
    for _ in range(2):
        tokens = (llama_token * n_tokens)()
        found = llama_tokenize(vocab, text, len(text), tokens, n_tokens, add_bos, special)
        if found >= 0:
            return list(tokens[:found])
        n_tokens = -found
    raise RuntimeError(f"llama.cpp cannot tokenize {text!r}")


def is_mark(model: HasVocabulary, token: int) -> bool:
    """Return whether a token is a control token or a user-defined one."""
    kinds = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED
    return token >= 0 and bool(llama_vocab_get_attr(model.native.vocab, token) & kinds)


def tokens_after(model: HasVocabulary, last: int, text: str, *, special: bool = True) -> list[int]:
    """Return the tokens of a text after the token `last`; -1 stands for any ordinary token."""
    is_sentencepiece = llama_vocab_type(model.native.vocab) == LLAMA_VOCAB_TYPE_SPM
    if not text or (is_sentencepiece and not is_mark(model, last)):
        return suffix_tokens(model, text, special=special)
    return model.tokenize(text.encode(), add_bos=False, special=special)


def suffix_tokens(model: HasVocabulary, suffix: str, *, special: bool = False) -> list[int]:
    """Return the tokens of a text after another, without the space some tokenizers insert."""

    def tokenized(text: str) -> list[int]:
        return model.tokenize(utf8(text), add_bos=False, special=special) if text else []

    if model.metadata.get("tokenizer.ggml.add_space_prefix", "true") != "true" or not suffix:
        return tokenized(suffix)
    # The tokenizer inserts the space before a prefix, whose tokens are removed again.
    prefix = "\N{WHITE SMILING FACE}"
    return tokenized(prefix + suffix)[len(tokenized(prefix)) :]


def inert_tokens(model: HasVocabulary, last: int, text: str) -> list[int]:
    """Return ordinary tokens of a text after the token `last`."""
    tokens = tokens_after(model, last, text, special=False)
    inert = model.chat.inert
    # The tokenizer always parses user-defined tokens, so their texts are split.
    if inert.tokens.isdisjoint(tokens) or len(pieces := inert.cut(text)) == 1:
        return tokens
    tokens = []
    for piece in pieces:
        tokens += inert_tokens(model, tokens[-1] if tokens else last, piece)
    return tokens
