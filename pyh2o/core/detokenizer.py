"""From tokens to bytes, one token at a time.

The work for a token never depends on the length of the text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from llama_cpp.llama_cpp import llama_token_to_piece, llama_vocab_n_tokens, llama_vocab_p
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

from ..errors import SettingsError
from .projector import is_of_picture
from .vocabulary import HasVocabulary, check_vocabulary

# A token's piece longer than this is fetched in a second call.
PIECE_BYTES = 64
# Tokenizers look back a token or two to decide on spaces; more only costs time.
CONTEXT_TOKENS = 16
# A character is at most 4 bytes, so after 4 tokens no further byte can complete it.
CHARACTER_TOKENS = 4
REPLACEMENT_CHARACTER = "\ufffd".encode()


class Detokenizer(Protocol):
    """Turns the tokens of one text into its bytes."""

    def feed(self, token: int) -> bytes:
        """Add a token; return the bytes that the text grows by, perhaps none yet."""

    def finish(self) -> bytes:
        """Return what `feed` still holds back, at the end of the text."""

    def piece(self, token: int) -> bytes:
        """Bytes of a token that might come next, without adding it."""


def detokenizer(
    model: HasVocabulary, before: Sequence[int], *, starts_text: bool, shown: Collection[int] = ()
) -> Detokenizer:
    """A detokenizer for the tokens that follow `before` in the model's tokenizer.

    Args:
        model: its tokenizer may have been replaced by the user.
        before: tokens of the text so far.
        starts_text: True if no text was before, only a BOS token perhaps.
        shown: control tokens that have a text here; only with llama.cpp's own tokenizers.
    """
    if model.tokenizer is None:
        bos = model.token_bos()
        return PieceDetokenizer(model.native.vocab, bos, starts_text=starts_text, shown=shown)
    return ContextDetokenizer(model.tokenizer, before)


def detokenize(parts: Detokenizer, tokens: Iterable[int]) -> bytes:
    """All bytes of a text that is complete."""
    data = b"".join(parts.feed(token) for token in tokens)
    return data + parts.finish()


class PieceDetokenizer:
    """For llama.cpp's own tokenizers, where a token's bytes depend on no other token.

    The exception is the space which SentencePiece puts before the first word of a text: it goes
    if the text begins here or its first token is BOS, as in `llama_cpp.Llama.detokenize`.
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
        """`special` gives control tokens their text, `shown` only these.

        Raises:
            ModelError: the model has no vocabulary.
        """
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
        """The same as in `Detokenizer`; pictures have no text.

        Raises:
            SettingsError: there is no such token: llama.cpp ends the process.
        """
        if is_of_picture(token):
            return b""
        if not 0 <= token < self._n_vocab:
            raise SettingsError(
                f"the model has tokens 0 to {self._n_vocab - 1}, and none is {token}: take the "
                "numbers from tokenize()"
            )
        special = self._special or token in self._shown
        buffer = (ctypes.c_char * PIECE_BYTES)()
        size = llama_token_to_piece(self._vocab, token, buffer, PIECE_BYTES, 0, special)
        if size < 0:
            buffer = (ctypes.c_char * -size)()
            size = llama_token_to_piece(self._vocab, token, buffer, -size, 0, special)
        return buffer.raw[:size]


class ContextDetokenizer:
    """For any other tokenizer, where spaces depend on the tokens before.

    Such a tokenizer answers in characters: an incomplete one comes out as U+FFFD until the tokens
    with its other bytes are there, so its tokens wait for them.
    """

    def __init__(self, tokenizer: BaseLlamaTokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # All of it, once: the last tokens of a chat prompt may be control tokens without text.
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
