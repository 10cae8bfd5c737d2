"""From tokens to text, one token at a time: bytes, whole characters, stop strings.

The work for a token depends on that token, the stop strings and the text that is still held back,
never on the length of the text. The pieces of text joined are the bytes of all tokens, cut at
the first stop string, decoded as UTF-8 with invalid bytes left out.
"""

from __future__ import annotations

import codecs
import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llama_cpp import Llama
from llama_cpp.llama_cpp import llama_token_to_piece, llama_vocab_p
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer, LlamaTokenizer

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


def detokenizer(llama: Llama, before: Sequence[int], *, starts_text: bool) -> Detokenizer:
    """A detokenizer for the tokens that follow `before` in the model's tokenizer.

    Args:
        llama: the model; its tokenizer may have been replaced by the user.
        before: tokens of the text so far.
        starts_text: True if no text was before, only a BOS token perhaps.
    """
    tokenizer: BaseLlamaTokenizer = llama.tokenizer_
    if type(tokenizer) is LlamaTokenizer:
        return PieceDetokenizer(llama._model.vocab, llama.token_bos(), starts_text=starts_text)
    return ContextDetokenizer(tokenizer, before)


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
        self, vocab: llama_vocab_p, bos: int, *, starts_text: bool, special: bool = False
    ) -> None:
        """`special` gives control tokens their text."""
        self._vocab = vocab
        self._bos = bos
        self._special = special
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
        buffer = (ctypes.c_char * PIECE_BYTES)()
        size = llama_token_to_piece(self._vocab, token, buffer, PIECE_BYTES, 0, self._special)
        if size < 0:
            buffer = (ctypes.c_char * -size)()
            size = llama_token_to_piece(self._vocab, token, buffer, -size, 0, self._special)
        return buffer.raw[:size]


class ContextDetokenizer:
    """For any other tokenizer, where spaces depend on the tokens before.

    Such a tokenizer answers in characters: an incomplete one comes out as U+FFFD until the tokens
    with its other bytes are there, so its tokens wait for them.
    """

    def __init__(self, tokenizer: BaseLlamaTokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # All of it, once: the last tokens of a chat prompt may be control tokens without text.
        self._context = list(before)
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


class StopFinder:
    """Finds the first stop string in bytes that come in parts, across the borders of the parts.

    Attributes:
        size: bytes fed so far.
        found: where the earliest stop string begins, or None. After that, feed no more.
        safe: bytes of the text that no stop string can begin in any more, however it goes on.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._tail = b""
        self.size = 0
        self.found: int | None = None
        self.safe = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        # A stop string that ends in the new bytes begins in them or in this much before them.
        window = self._tail + data
        start = self.size - len(self._tail)
        self.size += len(data)
        hits = [hit for stop in self._stops if (hit := window.find(stop)) >= 0]
        if hits:
            self.found = start + min(hits)
            self.safe = self.found
            return
        self.safe = self.size - max((_overlap(window, stop) for stop in self._stops), default=0)
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else b""


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of `text` that is a beginning, not all, of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """Text that is ready to be shown, and how many tokens it came from."""

    text: str
    tokens: int


@dataclass
class _Span:
    """Bytes of the fewest tokens that end with a whole character."""

    start: int
    data: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    whole: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def piece(self, end: int) -> Piece:
        """The text up to position `end`."""
        return Piece(self.data[: end - self.start].decode(errors="ignore"), self.tokens)


class TextStream:
    """Bytes of token after token in, pieces of text out.

    A piece holds the text of one token, or of as many as it takes to end with a whole character.
    It is held back as long as a stop string may begin in it.
    """

    def __init__(self, stops: Sequence[bytes] = ()) -> None:
        self._stops = StopFinder(stops)
        # Its output is not used, only whether it waits for the rest of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._held: deque[_Span] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.found is not None

    @property
    def held(self) -> bytes:
        """Bytes held back: an unfinished character, or what a stop string may begin in."""
        return b"".join(bytes(span.data) for span in self._held)

    @property
    def held_stop(self) -> bytes:
        """Bytes held back from the stop string on."""
        assert self._stops.found is not None
        return self.held[self._stops.found - self._held[0].start :]

    def feed(self, data: bytes, tokens: int = 1) -> list[Piece]:
        """Add the bytes of the next token or tokens; return the pieces that are ready now."""
        if not self._held or self._held[-1].whole:
            self._held.append(_Span(start=self._stops.size))
        span = self._held[-1]
        span.data += data
        span.tokens += tokens
        self._decoder.decode(data)
        span.whole = not self._decoder.getstate()[0]
        self._stops.feed(data)
        ready: list[Piece] = []
        while not self.stopped and self._held and self._is_ready(self._held[0]):
            span = self._held.popleft()
            ready.append(span.piece(span.end))
        return ready

    def finish(self) -> list[Piece]:
        """Return the pieces held back, up to the stop string or the end of the text."""
        end = self._stops.size if self._stops.found is None else self._stops.found
        rest: list[Piece] = []
        while self._held:
            span = self._held.popleft()
            rest.append(span.piece(end))
            if span.end >= end:
                break
        self._held.clear()
        return rest

    def _is_ready(self, span: _Span) -> bool:
        return span.whole and span.end <= self._stops.safe
