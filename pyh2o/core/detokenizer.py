"""Incremental detokenization, at a cost per token that does not depend on the text's length."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from llama_cpp.llama_cpp import llama_token_to_piece, llama_vocab_n_tokens, llama_vocab_p
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

from ..errors import SettingsError
from .projector import is_of_picture
from .vocabulary import HasVocabulary, check_vocabulary

# Longer pieces need a second call.
PIECE_BYTES = 64
# Tokenizers use one or two previous tokens to decide on spaces.
CONTEXT_TOKENS = 16
# A character has at most 4 bytes, so 4 tokens complete it.
CHARACTER_TOKENS = 4
REPLACEMENT_CHARACTER = "\ufffd".encode()


class Detokenizer(Protocol):
    """Converts the tokens of one text to bytes."""

    def feed(self, token: int) -> bytes:
        """Add a token, and return the new bytes of the text, possibly b""."""

    def finish(self) -> bytes:
        """Return the bytes that `feed` holds back, at the end of the text."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a possible next token, without adding it."""


def detokenizer(
    model: HasVocabulary, before: Sequence[int], *, starts_text: bool, shown: Collection[int] = ()
) -> Detokenizer:
    """Return a detokenizer for the tokens after `before`.

    Args:
        starts_text: whether there is no text before, except for a BOS token.
        shown: control tokens to convert to text; only with llama.cpp's tokenizers.
    """
    if model.tokenizer is None:
        bos = model.token_bos()
        return PieceDetokenizer(model.native.vocab, bos, starts_text=starts_text, shown=shown)
    return ContextDetokenizer(model.tokenizer, before)


def detokenize(parts: Detokenizer, tokens: Iterable[int]) -> bytes:
    data = b"".join(parts.feed(token) for token in tokens)
    return data + parts.finish()


class PieceDetokenizer:
    """For llama.cpp's tokenizers, where the bytes of a token do not depend on other tokens.

    The exception is the space that SentencePiece inserts before the first word of a text. It is
    removed at the start of a text or after BOS, as in `llama_cpp.Llama.detokenize`.
    """

    def __init__(
        self,
        vocab: llama_vocab_p,
        bos: int,
        *,
        starts_text: bool,
        special: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        """Convert all control tokens to text if `special`, otherwise only those in `shown`."""
        check_vocabulary(vocab)
        self._vocab = vocab
        self._n_vocab = int(llama_vocab_n_tokens(vocab))
        self._bos = bos
        self._special = special
        self._shown = shown
        self._at_first_token = True
        self._drop_space = starts_text

    def feed(self, token: int) -> bytes:
        if self._at_first_token:
            self._at_first_token = False
            self._drop_space |= token == self._bos
        data = self.piece(token)
        if data and self._drop_space:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return data

    def finish(self) -> bytes:
        return b""

    def piece(self, token: int) -> bytes:
        """See `Detokenizer`; pictures have no text."""
        if is_of_picture(token):
            return b""
        if not 0 <= token < self._n_vocab:
            raise SettingsError(
                f"token {token} is out of range (0 to {self._n_vocab - 1}): use tokens from "
                "tokenize()"
            )
        special = self._special or token in self._shown
        buffer = (ctypes.c_char * PIECE_BYTES)()
        size = llama_token_to_piece(self._vocab, token, buffer, PIECE_BYTES, 0, special)
        if size < 0:
            buffer = (ctypes.c_char * -size)()
            size = llama_token_to_piece(self._vocab, token, buffer, -size, 0, special)
        return buffer.raw[:size]


class ContextDetokenizer:
    """For other tokenizers, where spaces depend on previous tokens.

    They return U+FFFD for an incomplete character, so its tokens wait until the rest arrives.
    """

    def __init__(self, tokenizer: BaseLlamaTokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # the whole text once, as the last tokens of a chat prompt may be control tokens
        self._context = [token for token in before if not is_of_picture(token)]
        self._waiting: list[int] = []

    def feed(self, token: int) -> bytes:
        self._waiting.append(token)
        data = self._text_of_waiting()
        if data.endswith(REPLACEMENT_CHARACTER) and len(self._waiting) < CHARACTER_TOKENS:
            return b""
        self._context = [*self._context, *self._waiting][-CONTEXT_TOKENS:]
        self._waiting = []
        return data

    def finish(self) -> bytes:
        data = self._text_of_waiting() if self._waiting else b""
        self._waiting = []
        return data

    def piece(self, token: int) -> bytes:
        before = [*self._context, *self._waiting]
        data: bytes = self._tokenizer.detokenize([token], prev_tokens=before)
        return data

    def _text_of_waiting(self) -> bytes:
        data: bytes = self._tokenizer.detokenize(self._waiting, prev_tokens=self._context)
        return data
