"""Pictures and sound in a text, encoded by a projector (mmproj) with llama.cpp's mtmd.

A projector converts a picture to embeddings, which have positions and rows like tokens and are
evicted one by one. Each embedding has a negative token number, a hash of its values, so that
prefixes, snapshots and sessions can compare pictures. In the text of a prompt, a mark stands for a
picture. It contains the hash of the file, so a text can only refer to files that a client has sent.

With M-RoPE, embeddings also have a row and column in the picture, which are part of the hash. The
native library computes these positions (llama-h2o.h), also without eviction.

With non-causal attention (Gemma 3), a picture is evaluated in one batch, and a text is not divided
or truncated within it. The token numbers mark its first and last embedding.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ..errors import ClosedError, ModelError, PictureError, StateError
from ..models.damage import check_file
from .utf8 import utf8

if TYPE_CHECKING:
    from .weights import Weights

Embeddings = npt.NDArray[np.single]
GridPositions = npt.NDArray[np.int32]

# Token numbers of embeddings are below this.
_FIRST = -(2**20)
_COUNT = 2**31 - 2**20
# Size limit of the files, and of the embeddings; the least recently used are removed.
MAX_BYTES = 512 * 2**20
_MARK = re.compile(rb"<picture:([0-9a-f]{64})>")
# Bits of token numbers, for the first and last embedding of a non-causal picture.
BEGINS, ENDS = 1, 2
UNKNOWN = (
    "unsupported positions of pictures or sound in this model: remove the projector (mmproj), or "
    "use a model such as Qwen-VL or SmolVLM"
)
WITHIN = (
    "this model evaluates a picture in one batch, and the tokens start or end within one: evaluate "
    "whole pictures"
)


def is_of_picture(token: int) -> bool:
    """Return whether a token number stands for an embedding."""
    return token < _FIRST


def n_of_a_kind(tokens: Sequence[int]) -> int:
    """Return how many first tokens are all embeddings, or all not, as a batch cannot mix them."""
    if min(tokens) >= _FIRST:
        return len(tokens)
    kinds = map(is_of_picture, tokens)
    return len(list(itertools.takewhile(lambda kind: kind == is_of_picture(tokens[0]), kinds)))


def n_of_picture(tokens: Sequence[int]) -> int:
    """Return the length of the non-causal picture at the start; a part of one is a StateError."""
    ends = (n for n, token in enumerate(tokens, 1) if not is_of_picture(token) or token & ENDS)
    n = next(ends, 0)
    if not (n and is_of_picture(tokens[n - 1]) and tokens[0] & BEGINS):
        raise StateError(WITHIN)
    return n


def keys_in(text: str) -> list[str]:
    return [key.decode() for key in _MARK.findall(utf8(text))]


class Projector:
    """Encodes pictures and sound for a model. Its methods are thread-safe.

    Attributes:
        sees, hears: whether it supports pictures and sound.
        looks_ahead: whether attention within a picture is non-causal.
        has_places: whether embeddings have a row and column (M-RoPE).
    """

    def __init__(
        self, path: str, weights: Weights, *, most: int, n_threads: int, verbose: bool
    ) -> None:
        """Load a projector (mmproj) for the model; `most` is the maximum of tokens in a batch."""
        # imported after pyh2o's library was loaded; most programs do not need it
        from llama_cpp import mtmd_cpp as mtmd
        from llama_cpp._logger import llama_log_callback

        check_file(path)
        self._mtmd: Any = mtmd
        self._encoding = threading.Lock()  # of `_native`
        self._lock = threading.Lock()  # of the fields below
        self._files: OrderedDict[str, bytes] = OrderedDict()  # files by hash
        self._read: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # tokens by hash
        self._found: dict[int, Embeddings] = {}
        mtmd.mtmd_helper_log_set(llama_log_callback, ctypes.c_void_p(0))
        params = mtmd.mtmd_context_params_default()
        params.n_threads, params.print_timings, params.warmup = n_threads, verbose, False
        params.use_gpu = bool(weights.params.n_gpu_layers) and not weights.rpc_servers
        self._native: Any = mtmd.mtmd_init_from_file(
            os.fsencode(path), weights.native.model, params
        )
        if not self._native:
            raise ModelError(
                f"{path} is not a projector for this model: use the mmproj file made for it"
            )
        self.n_embd = int(llama_cpp.llama_model_n_embd_inp(weights.native.model))
        self.sees = bool(mtmd.mtmd_support_vision(self._native))
        self.hears = bool(mtmd.mtmd_support_audio(self._native))
        self.looks_ahead = bool(mtmd.mtmd_decode_use_non_causal(self._native, None))
        self.has_places = bool(mtmd.mtmd_decode_use_mrope(self._native))
        self._n_place = 3 if self.has_places else 0
        self._most = most

    @property
    def formats(self) -> str:
        pictures = ["JPEG, PNG, BMP or GIF of up to 8,192 pixels a side"] if self.sees else []
        sound = ["WAV, MP3 or FLAC of up to an hour"] if self.hears else []
        return ", or ".join(pictures + sound)

    def close(self) -> None:
        with self._encoding:
            native, self._native = self._native, None
            if native:
                self._mtmd.mtmd_free(native)

    # ---------------------------------------------------------------------------------------------
    # Marks, tokens and embeddings
    # ---------------------------------------------------------------------------------------------

    def mark(self, data: bytes) -> str:
        """Return the mark of a JPEG, PNG, BMP, GIF, WAV, MP3 or FLAC file for a prompt's text."""
        key = self.remember(data)
        self._tokens_of(key)
        return f"<picture:{key}>"

    def remember(self, data: bytes) -> str:
        """Store a file, to be encoded when needed, and return its hash."""
        key = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._files[key] = data
            self._files.move_to_end(key)
            while sum(map(len, self._files.values())) > MAX_BYTES and len(self._files) > 1:
                self._files.popitem(last=False)
        return key

    def files_in(self, text: str) -> dict[str, bytes]:
        """Return the files of the marks in a text, by hash."""
        with self._lock:
            return {key: self._files[key] for key in keys_in(text) if key in self._files}

    def pieces(self, text: bytes) -> Iterator[bytes | tuple[int, ...]]:
        """Yield text and the tokens of pictures alternately, starting and ending with text."""
        begin = 0
        for mark in _MARK.finditer(text):
            tokens = self._tokens_of(mark[1].decode())
            if tokens is not None:
                yield text[begin : mark.start()]
                yield tokens
                begin = mark.end()
        yield text[begin:]

    def embeddings(self, tokens: Sequence[int]) -> tuple[Embeddings, GridPositions]:
        """Return [n_tokens, n_embd] embeddings and [n_tokens, 0 or 3] positions (llama-h2o.h)."""
        with self._lock:
            unread = [] if self._found.keys() >= set(tokens) else self._files.keys() - self._read
        for key in unread:
            with contextlib.suppress(PictureError):  # from a session with another projector
                self._tokens_of(key)
        with self._lock:
            try:
                rows = np.stack([self._found[token] for token in tokens])
            except KeyError:
                raise StateError(
                    "a picture of the text must be read again, but is no longer available: send "
                    "it again"
                ) from None
        places = rows[:, self.n_embd :].view(np.int32)
        return rows[:, : self.n_embd], places[:, : self._n_place]

    def _tokens_of(self, key: str) -> tuple[int, ...] | None:
        """Return the tokens of a picture, encoding it if necessary; None if it is unavailable."""
        with self._lock:
            tokens, data = self._read.get(key), self._files.get(key)
            if tokens is not None:
                self._read.move_to_end(key)
        if tokens is None and data is not None:
            try:
                found = self._encode(data)
            except PictureError:
                with self._lock:
                    self._files.pop(key, None)
                raise
            with self._lock:
                tokens = self._keep(key, *found)
        return tokens

    def _keep(
        self, key: str, tokens: list[int | None], embeddings: list[Embeddings]
    ) -> tuple[int, ...]:
        """Store embeddings of a picture under new tokens, and remove others beyond the limit."""
        names = (self._named(embedding) for embedding in embeddings)
        kept = tuple(next(names) if token is None else token for token in tokens)
        self._read[key] = kept
        most = MAX_BYTES // (4 * self.n_embd)
        while len(self._found) > most and len(self._read) > 1:
            self._read.popitem(last=False)
            there = set(itertools.chain.from_iterable(self._read.values()))
            self._found = {token: row for token, row in self._found.items() if token in there}
        return kept

    def _named(self, embedding: Embeddings) -> int:
        """Return a token number for an embedding that no other embedding has."""
        data = embedding.tobytes()
        digest = hashlib.blake2b(data, digest_size=8).digest()
        token = _FIRST - 1 - int.from_bytes(digest, "little") % _COUNT
        while self._found.setdefault(self._marked(token, embedding), embedding).tobytes() != data:
            token = token - 4 if token >= 4 - 2**31 else _FIRST - 1
        return self._marked(token, embedding)

    def _marked(self, token: int, embedding: Embeddings) -> int:
        """Set the BEGINS and ENDS bits of a token number, for non-causal pictures."""
        if not self.looks_ahead:
            return token
        return token & ~(BEGINS | ENDS) | int(embedding[-1:].view(np.int32)[0])

    # ---------------------------------------------------------------------------------------------
    # mtmd
    # ---------------------------------------------------------------------------------------------

    def _encode(self, data: bytes) -> tuple[list[int | None], list[Embeddings]]:
        """Return the tokens of a picture, None for each embedding, and embeddings with marks."""
        mtmd, tokens, embeddings = self._mtmd, list[int | None](), list[Embeddings]()
        is_valid = True
        with self._encoding, contextlib.ExitStack() as stack:
            if not self._native:
                raise ClosedError("the model is closed: load it again")
            for chunk in self._chunks(data, stack):
                n_tokens = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
                if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    count = ctypes.c_size_t()
                    found = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                    tokens += found[: count.value]
                    continue
                marks = self._marks(chunk, n_tokens)
                if mtmd.mtmd_encode_chunk(self._native, chunk) != 0:
                    raise PictureError("the projector cannot encode the picture: try another one")
                found = mtmd.mtmd_get_output_embd(self._native)
                rows = np.ctypeslib.as_array(found, (n_tokens, self.n_embd))
                is_valid &= bool(np.isfinite(rows).all())
                tokens += [None] * n_tokens
                embeddings.extend(np.hstack([rows, marks.view(np.single)]))
        if not is_valid or any(t is not None and t < 0 for t in tokens):
            raise PictureError(
                "the projector returned invalid embeddings: its file is damaged, or for another "
                "model"
            )
        return tokens, embeddings

    def _marks(self, chunk: int, n_tokens: int) -> GridPositions:
        """Return positions of embeddings, and marks of the first and last one."""
        mtmd = self._mtmd
        if bool(mtmd.mtmd_decode_use_non_causal(self._native, chunk)) != self.looks_ahead:
            raise PictureError(UNKNOWN)
        places = self._places(chunk, n_tokens)
        if not self.looks_ahead:
            return places
        if n_tokens > self._most:
            raise PictureError(
                f"a picture of {n_tokens} tokens must be one batch, but the limit is {self._most}: "
                f"raise slack (--slack), n_batch and n_ubatch to {n_tokens}"
            )
        marks = np.zeros((n_tokens, 1), np.int32)
        marks[0] |= BEGINS
        marks[-1] |= ENDS
        return np.hstack([places, marks])

    def _places(self, chunk: int, n_tokens: int) -> GridPositions:
        """Return the index of each embedding, row by row, and the size of the picture."""
        mtmd, n_pos = self._mtmd, self._mtmd.mtmd_input_chunk_get_n_pos(chunk)
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        if not self._n_place or not image:
            is_known = n_pos == n_tokens
            places = np.full((n_tokens, self._n_place), -1, np.int32)
        else:
            at = (mtmd.mtmd_decoder_pos * n_tokens)()
            mtmd.mtmd_helper_image_get_decoder_pos(image, 0, at)
            width, height = (1 + max(getattr(one, side) for one in at) for side in "xy")
            is_known = n_pos == max(width, height) and all(
                (one.t, one.y * width + one.x, one.z) == (0, i, 0) for i, one in enumerate(at)
            )
            places = np.array([(i, width, height) for i in range(n_tokens)], np.int32)
        if not is_known:
            raise PictureError(UNKNOWN)
        return places

    def _chunks(self, data: bytes, stack: contextlib.ExitStack) -> Iterator[int]:
        """Yield mtmd's chunks of a picture: text, and parts to encode."""
        mtmd = self._mtmd
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._native, buffer, len(data), False)
        if not bitmap:
            raise PictureError(f"the picture or sound cannot be read: give {self.formats}")
        stack.callback(mtmd.mtmd_bitmap_free, bitmap)
        if not (self.hears if mtmd.mtmd_bitmap_is_audio(bitmap) else self.sees):
            raise PictureError(f"unsupported by the projector: give {self.formats}")
        part = ctypes.pointer(mtmd.mtmd_input_part(None, bitmap))
        chunks = mtmd.mtmd_input_chunks_init()
        stack.callback(mtmd.mtmd_input_chunks_free, chunks)
        parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(part)
        if mtmd.mtmd_tokenize_from_parts(self._native, chunks, parts, 1, False) != 0:
            raise PictureError(
                "the projector cannot use the picture: try a larger one, or another one"
            )
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            yield mtmd.mtmd_input_chunks_get(chunks, i)
