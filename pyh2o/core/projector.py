"""Pictures and sound in a text: what a projector (mmproj) makes of them, by llama.cpp's mtmd.

A projector turns a picture into embeddings, which take places in a text as those of tokens do;
their rows stay or go one by one, too. So that prefixes, the store and sessions know a picture that
was read, each embedding has a number for a token, below 0, which is made of its bytes. In the text
of a prompt a mark stands for a picture; it has the hash of its file, so a text can only name a
picture that somebody has given.

Some models tell the embeddings of a picture apart by row and column (M-RoPE): each then has its
place in the picture, and its number is made of that, too. The native library counts such positions
(llama-h2o.h), also where it evicts nothing.

Others let a picture look ahead at itself (Gemma 3): it is computed at once, and a text is not
divided or shortened within it. The numbers of its embeddings say where it begins and ends.
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
Places = npt.NDArray[np.int32]

# Tokens above are the vocabulary's, or none.
_FIRST = -(2**20)
_COUNT = 2**31 - 2**20
# What the files of pictures may take, and so may embeddings; those go that were used longest ago.
MAX_BYTES = 512 * 2**20
_MARK = re.compile(rb"<picture:([0-9a-f]{64})>")
# In the numbers of embeddings, where a picture looks ahead.
BEGINS, ENDS = 1, 2
UNKNOWN = (
    "this model reads pictures or sound in a way that is not known here: leave the projector out "
    "(mmproj), or take a model such as Qwen-VL or SmolVLM"
)
WITHIN = (
    "pictures of this model are computed at once, and the tokens begin or end within one: evaluate "
    "all of a picture"
)


def is_of_picture(token: int) -> bool:
    """Whether the number stands for an embedding, and not for a token of the vocabulary."""
    return token < _FIRST


def n_of_a_kind(tokens: Sequence[int]) -> int:
    """How many of the first tokens are all of pictures, or none of them: one batch has no more."""
    if min(tokens) >= _FIRST:
        return len(tokens)
    kinds = map(is_of_picture, tokens)
    return len(list(itertools.takewhile(lambda kind: kind == is_of_picture(tokens[0]), kinds)))


def n_of_picture(tokens: Sequence[int]) -> int:
    """How many of the first tokens are those of a picture that looks ahead.

    Raises:
        StateError: they begin or end within it.
    """
    ends = (n for n, token in enumerate(tokens, 1) if not is_of_picture(token) or token & ENDS)
    n = next(ends, 0)
    if not (n and is_of_picture(tokens[n - 1]) and tokens[0] & BEGINS):
        raise StateError(WITHIN)
    return n


def keys_in(text: str) -> list[str]:
    """The hashes in the marks of a text."""
    return [key.decode() for key in _MARK.findall(utf8(text))]


class Projector:
    """Makes embeddings of pictures and of sound for a model.

    Any thread may use it.

    Attributes:
        n_embd: elements of an embedding.
        sees, hears: whether it takes pictures, and sound.
        looks_ahead: whether the tokens of a picture look at those behind them.
        has_places: whether each has a place in it, row and column.
    """

    def __init__(
        self,
        path: str,
        weights: Weights,
        *,
        most: int,
        n_threads: int,
        verbose: bool,
    ) -> None:
        """Load it.

        Args:
            path: a GGUF file (mmproj) made for the model.
            weights: of the model.
            most: tokens that are computed at once.
            n_threads: that compute it.
            verbose: show llama.cpp's log.

        Raises:
            ModelError: the file is no projector, or not this model's.
        """
        # after pyh2o's library, which most programs need alone
        from llama_cpp import mtmd_cpp as mtmd
        from llama_cpp._logger import llama_log_callback

        check_file(path)
        self._mtmd: Any = mtmd
        self._encoding = threading.Lock()  # mtmd's object
        self._lock = threading.Lock()  # what follows
        self._files: OrderedDict[str, bytes] = OrderedDict()  # by their hashes
        self._read: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # their tokens
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
                f"{path} is no projector for this model: give the mmproj file that was made with it"
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
        """What it reads, in words."""
        pictures = ["JPEG, PNG, BMP or GIF of up to 8,192 pixels a side"] if self.sees else []
        sound = ["WAV, MP3 or FLAC of up to an hour"] if self.hears else []
        return ", or ".join(pictures + sound)

    def close(self) -> None:
        """Free it."""
        with self._encoding:
            native, self._native = self._native, None
            if native:
                self._mtmd.mtmd_free(native)

    # ---------------------------------------------------------------------------------------------
    # What stands for a picture
    # ---------------------------------------------------------------------------------------------

    def mark(self, data: bytes) -> str:
        """What stands for a picture, or for sound, in the text of a prompt.

        Args:
            data: of its file: JPEG, PNG, BMP, GIF; WAV, MP3, FLAC.

        Raises:
            PictureError: it cannot be read, or the model does not take it.
        """
        key = self.remember(data)
        self._tokens_of(key)
        return f"<picture:{key}>"

    def remember(self, data: bytes) -> str:
        """Have the file of a picture, which is read when it is needed; the hash in its mark."""
        key = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._files[key] = data
            self._files.move_to_end(key)
            while sum(map(len, self._files.values())) > MAX_BYTES and len(self._files) > 1:
                self._files.popitem(last=False)
        return key

    def files_in(self, text: str) -> dict[str, bytes]:
        """The files of the pictures whose marks are in a text, by their hashes."""
        with self._lock:
            return {key: self._files[key] for key in keys_in(text) if key in self._files}

    def pieces(self, text: bytes) -> Iterator[bytes | tuple[int, ...]]:
        """A text in pieces: first its beginning, then by turns a picture's tokens and text.

        Raises:
            PictureError: a picture cannot be read.
        """
        begin = 0
        for mark in _MARK.finditer(text):
            tokens = self._tokens_of(mark[1].decode())
            if tokens is not None:
                yield text[begin : mark.start()]
                yield tokens
                begin = mark.end()
        yield text[begin:]

    def embeddings(self, tokens: Sequence[int]) -> tuple[Embeddings, Places]:
        """Those that these tokens stand for, and their places in their pictures.

        Returns:
            [n_tokens, n_embd], and what llama-h2o.h wants as their other positions:
            [n_tokens, 0 or 3].

        Raises:
            StateError: their picture is not here, or was read by another projector.
        """
        with self._lock:
            unread = [] if self._found.keys() >= set(tokens) else self._files.keys() - self._read
        for key in unread:
            with contextlib.suppress(PictureError):  # of a session with another projector
                self._tokens_of(key)
        with self._lock:
            try:
                rows = np.stack([self._found[token] for token in tokens])
            except KeyError:
                raise StateError(
                    "a picture of the text has to be read again and is not here any more: send it "
                    "again, or have the text of a session read again"
                ) from None
        places = rows[:, self.n_embd :].view(np.int32)
        return rows[:, : self.n_embd], places[:, : self._n_place]

    def _tokens_of(self, key: str) -> tuple[int, ...] | None:
        """Those of a picture, which is read first if it must; None if it is not here."""
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
        """Name the embeddings of a picture; others go where they take too much memory."""
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
        """The number of an embedding, which no other one has here."""
        data = embedding.tobytes()
        digest = hashlib.blake2b(data, digest_size=8).digest()
        token = _FIRST - 1 - int.from_bytes(digest, "little") % _COUNT
        while self._found.setdefault(self._marked(token, embedding), embedding).tobytes() != data:
            token = token - 4 if token >= 4 - 2**31 else _FIRST - 1
        return self._marked(token, embedding)

    def _marked(self, token: int, embedding: Embeddings) -> int:
        """A number that says where a picture begins and ends, if that has to be known."""
        if not self.looks_ahead:
            return token
        return token & ~(BEGINS | ENDS) | int(embedding[-1:].view(np.int32)[0])

    # ---------------------------------------------------------------------------------------------
    # mtmd
    # ---------------------------------------------------------------------------------------------

    def _encode(self, data: bytes) -> tuple[list[int | None], list[Embeddings]]:
        """The tokens of a picture, None for each of its embeddings, and these with their marks."""
        mtmd, tokens, embeddings = self._mtmd, list[int | None](), list[Embeddings]()
        is_sound = True
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
                    raise PictureError("the projector cannot encode the picture: give another one")
                found = mtmd.mtmd_get_output_embd(self._native)
                rows = np.ctypeslib.as_array(found, (n_tokens, self.n_embd))
                is_sound &= bool(np.isfinite(rows).all())
                tokens += [None] * n_tokens
                embeddings.extend(np.hstack([rows, marks.view(np.single)]))
        if not is_sound or any(t is not None and t < 0 for t in tokens):
            raise PictureError(
                "the projector makes no sense of it: its file is damaged, or is another model's"
            )
        return tokens, embeddings

    def _marks(self, chunk: int, n_tokens: int) -> Places:
        """What is to be known of embeddings: their places, and where a picture begins and ends.

        Raises:
            PictureError: it cannot be computed as the model wants it.
        """
        mtmd = self._mtmd
        if bool(mtmd.mtmd_decode_use_non_causal(self._native, chunk)) != self.looks_ahead:
            raise PictureError(UNKNOWN)
        places = self._places(chunk, n_tokens)
        if not self.looks_ahead:
            return places
        if n_tokens > self._most:
            raise PictureError(
                f"pictures of this model are computed at once, {n_tokens} tokens, and no more than "
                f"{self._most} are: raise slack (--slack), n_batch and n_ubatch to that"
            )
        marks = np.zeros((n_tokens, 1), np.int32)
        marks[0] |= BEGINS
        marks[-1] |= ENDS
        return np.hstack([places, marks])

    def _places(self, chunk: int, n_tokens: int) -> Places:
        """Of each of its embeddings: its number in the picture, row by row, and the picture's size.

        Raises:
            PictureError: their positions follow from something else.
        """
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
        """mtmd's pieces of a picture: text and what is to be encoded."""
        mtmd = self._mtmd
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._native, buffer, len(data), False)
        if not bitmap:
            raise PictureError(f"a picture or sound cannot be read: give {self.formats}")
        stack.callback(mtmd.mtmd_bitmap_free, bitmap)
        if not (self.hears if mtmd.mtmd_bitmap_is_audio(bitmap) else self.sees):
            raise PictureError(f"the projector does not take that: give {self.formats}")
        part = ctypes.pointer(mtmd.mtmd_input_part(None, bitmap))
        chunks = mtmd.mtmd_input_chunks_init()
        stack.callback(mtmd.mtmd_input_chunks_free, chunks)
        parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(part)
        if mtmd.mtmd_tokenize_from_parts(self._native, chunks, parts, 1, False) != 0:
            raise PictureError(
                "the projector cannot use the picture: give a larger one, or another"
            )
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            yield mtmd.mtmd_input_chunks_get(chunks, i)
