"""The native archive next to a simple model of it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize

from compiled import NATIVE, ROOT, compile_library, ggml_header, int32s, pointer
from pyh2o.library import LIBRARY_FOLDER
from row_types import TYPES

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

N_PAGE = 128
PADDING = 4096

# KV heads and the row sizes of K and V for each layer
LAYERS = ((2, 64, 32), (1, 32, 96))
SMALL = ((1, 32, 32),)

# bytes of a file's header, and of the used fields of a page's header
HEADER, PAGE_HEADER = PADDING, 560

# in the order of archive_numbers()
NUMBERS = (
    "first",
    "next",
    "n_dropped",
    "page_begin",
    "page_end",
    "n_bytes",
    "type",
)


class ArchiveError(Exception):
    """An exception of the archive."""


@functools.cache
def compile_archive() -> ctypes.CDLL:
    """Compile the archive alone, without llama.cpp."""
    parts = ROOT / "tests" / "native" / "parts"
    (ggml,) = Path(LIBRARY_FOLDER).glob("libggml-base.*")
    native = compile_library(
        "archive",
        [parts / "archive.cpp", *sorted((NATIVE / "src" / "recall").glob("h2o-archive*.cpp"))],
        [ggml_header()],
        [ggml],
    )
    native.archive_error.restype = ctypes.c_char_p
    native.archive_write_error.restype = ctypes.c_char_p
    native.archive_write_state.restype = ctypes.c_uint64
    native.archive_new.restype = ctypes.c_void_p
    native.archive_is_shared.restype = ctypes.c_bool
    return native


def rounded(rows: FloatArray, kind: str) -> FloatArray:
    """Return rows as a type stores them."""
    return dequantize(quantize(rows, TYPES[kind]), TYPES[kind]).astype(np.float32)


@dataclass(frozen=True)
class Token:
    """A token's data in the archive: the rows of all heads for each layer."""

    id: int
    k: FloatArray
    v: FloatArray


def elements(layers: Sequence[Any], part: int) -> int:
    """Count the elements of all heads of all layers in K (1) or V (2)."""
    return sum(shape[0] * shape[part] for shape in layers)


def random_token(rng: np.random.Generator, layers: Sequence[Any] = LAYERS) -> Token:
    k, v = (rng.normal(size=elements(layers, part)).astype(np.float32) for part in (1, 2))
    return Token(int(rng.integers(2**31)), k, v)


class Archive:
    """A native archive; exceptions are raised as `ArchiveError`."""

    made: int | None = None

    def __init__(
        self, kind: str | int = "f32", max_bytes: int = 0, layers: Sequence[Any] = LAYERS
    ) -> None:
        self.native = native = compile_archive()
        self.layers = layers
        self.kind = str(kind)
        shapes = np.array(layers, dtype=np.uint32)
        number = int(TYPES[kind]) if isinstance(kind, str) else kind
        self.made = native.archive_new(
            pointer(shapes), len(layers), number, ctypes.c_uint64(max_bytes)
        )
        if not self.made:
            raise ArchiveError(native.archive_error().decode())

    def call(self, name: str, *arguments: Any) -> None:
        if not getattr(self.native, f"archive_{name}")(ctypes.c_void_p(self.made), *arguments):
            raise ArchiveError(self.native.archive_error().decode())

    def close(self) -> None:
        self.native.archive_delete(ctypes.c_void_p(self.made))
        self.made = None

    def __del__(self) -> None:
        if self.made:
            self.close()

    @property
    def numbers(self) -> dict[str, int]:
        numbers = np.zeros(len(NUMBERS), dtype=np.int64)
        self.native.archive_numbers(ctypes.c_void_p(self.made), pointer(numbers))
        return dict(zip(NUMBERS, numbers.tolist(), strict=True))

    @property
    def held(self) -> range:
        return range(self.numbers["first"], self.numbers["next"])

    def share(self, most: int = 1000) -> npt.NDArray[np.int32]:
        """Share pages with other archives. Return the bytes made in this thread and in others."""
        n_made = np.zeros(2, dtype=np.int32)
        self.native.archive_share(ctypes.c_void_p(self.made), most, pointer(n_made))
        self.n_made = n_made  # keeps the memory alive as long
        return n_made

    @property
    def is_shared(self) -> bool:
        return bool(self.native.archive_is_shared(ctypes.c_void_p(self.made)))

    def clear(self) -> None:
        self.native.archive_clear(ctypes.c_void_p(self.made))

    def begin_at(self, p: int) -> None:
        self.call("begin_at", p)

    def open_file(
        self, path: Path, text: bytes = b"one of the texts", *, moves: bool = False
    ) -> None:
        """Continue the file's text; the held tokens are written there if it `moves`."""
        self.call("open_file", str(path).encode(), text, moves)

    @property
    def write_error(self) -> str:
        error: bytes = self.native.archive_write_error(ctypes.c_void_p(self.made))
        return error.decode()

    def release(self) -> None:
        """Release all pages."""
        for page in range(self.numbers["page_begin"], self.numbers["page_end"]):
            self.call("release", page)

    def drop_damaged(self) -> int:
        """Return how many tokens were dropped."""
        n_dropped = ctypes.c_int32()
        pages = (self.numbers["page_begin"], self.numbers["page_end"])
        self.call("drop_damaged", *pages, ctypes.byref(n_dropped))
        return n_dropped.value

    def state(self) -> bytes:
        size = self.native.archive_write_state(ctypes.c_void_p(self.made), None, ctypes.c_uint64(0))
        state = ctypes.create_string_buffer(size)
        self.native.archive_write_state(ctypes.c_void_p(self.made), state, ctypes.c_uint64(size))
        return state.raw

    def read_state(self, state: bytes) -> int:
        """Return how many tokens are missing."""
        n_missing = ctypes.c_int32()
        self.call("read_state", state, ctypes.c_uint64(len(state)), ctypes.byref(n_missing))
        return n_missing.value

    def extend(self, tokens: Sequence[Token], *, has_rows: bool = True) -> None:
        p = self.held.stop
        self.call("extend", len(tokens), pointer(int32s(t.id for t in tokens)), has_rows)
        for i in range(len(tokens)):
            if has_rows and p + i in self.held:
                self.set(p + i, tokens[i])
        self.call("end_extend")

    def drop_rows(self, p0: int, p1: int) -> None:
        self.native.archive_drop_rows(ctypes.c_void_p(self.made), p0, p1)

    def set(self, p: int, token: Token) -> None:
        self.call("set", p, pointer(token.k), pointer(token.v))

    def get(self, p: int) -> Token:
        token = ctypes.c_int32()
        self.call("token", p, ctypes.byref(token))
        k, v = (np.zeros(elements(self.layers, part), np.float32) for part in (1, 2))
        self.call("get", p, pointer(k), pointer(v))
        return Token(token.value, k, v)

    def page(self, page: int, layer: int, head: int) -> tuple[ByteArray, ByteArray]:
        """Return the bytes of a page's rows, [N_PAGE, bytes of a row], of K and of V."""
        _, n_k, n_v = self.layers[layer]
        k, v = (
            quantize(np.zeros((N_PAGE, n), np.float32), TYPES[self.kind]).view(np.uint8)
            for n in (n_k, n_v)
        )
        self.call("page", page, layer, head, pointer(k), pointer(v))
        return k, v

    def page_bytes(self) -> int:
        """Return the size of a page: a header and its rows with padding."""
        rows = (np.zeros(elements(self.layers, part), np.float32) for part in (1, 2))
        size = sum(quantize(row, TYPES[self.kind]).nbytes for row in rows) * N_PAGE
        return PADDING + -(-size // PADDING) * PADDING


def append(archive: Archive, tokens: dict[int, Token], rng: np.random.Generator, n: int) -> None:
    """Append random tokens to both; remove from `tokens` what the archive drops."""
    p = archive.held.stop
    new = [random_token(rng, archive.layers) for _ in range(n)]
    archive.extend(new)
    tokens |= {p + i: token for i, token in enumerate(new)}
    for gone in tokens.keys() - {*archive.held}:
        del tokens[gone]


def assert_holds(archive: Archive, tokens: dict[int, Token]) -> None:
    """Check for exactly these tokens, rounded to the archive's type."""
    assert [*archive.held] == sorted(tokens)
    if not tokens:
        return
    found = [archive.get(p) for p in tokens]
    assert [token.id for token in found] == [token.id for token in tokens.values()]
    for part in ("k", "v"):
        rows, given = (
            np.stack([getattr(token, part) for token in of]) for of in (found, tokens.values())
        )
        np.testing.assert_array_equal(rows, rounded(given, archive.kind))


def opened(path: Path, max_pages: int = 0) -> Archive:
    size = Archive(layers=SMALL).page_bytes()
    archive = Archive(layers=SMALL, max_bytes=max_pages * size)
    archive.open_file(path)
    return archive


def written(path: Path, rng: np.random.Generator, n: int) -> dict[int, Token]:
    """Write an archive of `n` tokens to a file. Return the path and the tokens in the file."""
    archive, tokens = opened(path), dict[int, Token]()
    append(archive, tokens, rng, n)
    archive.close()
    return {p: token for p, token in tokens.items() if p < n // N_PAGE * N_PAGE}


def assert_file_holds(path: Path, tokens: dict[int, Token]) -> None:
    archive = opened(path)
    assert_holds(archive, tokens)
    archive.close()
