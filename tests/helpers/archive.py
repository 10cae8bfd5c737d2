"""The native archive beside a plain model of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from compiled import NATIVE, ROOT, compile_library, int32s, pointer
from pyh2o.library import LIBRARY_FOLDER

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

N_PAGE = 64
PADDING = 4096

TYPES = {
    "f32": GGMLQuantizationType.F32,
    "f16": GGMLQuantizationType.F16,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}

# KV heads and the elements of their rows of K and of V, layer by layer
LAYERS = ((2, 64, 32), (1, 32, 96))


# in the order of archive_numbers()
NUMBERS = (
    "first",
    "next",
    "is_complete",
    "n_dropped",
    "page_begin",
    "page_end",
    "n_bytes",
    "type",
)


class ArchiveError(Exception):
    """What the archive has thrown."""


def compile_archive() -> ctypes.CDLL:
    parts = ROOT / "tests" / "native" / "parts"
    (ggml,) = Path(LIBRARY_FOLDER).glob("libggml-base.*")
    native = compile_library(
        "archive",
        [parts / "archive.cpp", *sorted((NATIVE / "src" / "recall").glob("h2o-archive*.cpp"))],
        [parts / "ggml"],
        [ggml],
    )
    native.archive_error.restype = ctypes.c_char_p
    native.archive_new.restype = ctypes.c_void_p
    return native


def rounded(rows: FloatArray, kind: str) -> FloatArray:
    """Rows as a type has them."""
    return dequantize(quantize(rows, TYPES[kind]), TYPES[kind]).astype(np.float32)


@dataclass(frozen=True)
class Token:
    """All that an archive holds of a token; the rows of all heads, layer by layer."""

    id: int
    shift: int
    k: FloatArray
    v: FloatArray


def elements(layers: Sequence[Any], part: int) -> int:
    """Of all heads of all layers, in K (1) or V (2)."""
    return sum(shape[0] * shape[part] for shape in layers)


def random_token(rng: np.random.Generator, shift: int, layers: Sequence[Any] = LAYERS) -> Token:
    k, v = (rng.normal(size=elements(layers, part)).astype(np.float32) for part in (1, 2))
    return Token(int(rng.integers(2**31)), shift, k, v)


class Archive:
    """A native archive. Where something is thrown an `ArchiveError` is raised."""

    def __init__(
        self,
        native: ctypes.CDLL,
        kind: str | int = "f32",
        max_bytes: int = 0,
        layers: Sequence[Any] = LAYERS,
    ) -> None:
        self.native, self.layers = native, layers
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

    @property
    def numbers(self) -> dict[str, int]:
        numbers = np.zeros(len(NUMBERS), dtype=np.int64)
        self.native.archive_numbers(ctypes.c_void_p(self.made), pointer(numbers))
        return dict(zip(NUMBERS, numbers.tolist(), strict=True))

    @property
    def held(self) -> range:
        return range(self.numbers["first"], self.numbers["next"])

    def clear(self) -> None:
        self.native.archive_clear(ctypes.c_void_p(self.made))

    def begin_at(self, p: int) -> None:
        self.call("begin_at", p)

    def extend(self, tokens: Sequence[Token]) -> None:
        """All of one shift."""
        p = self.held.stop
        self.call("extend", len(tokens), tokens[0].shift, pointer(int32s(t.id for t in tokens)))
        for i in range(len(tokens)):
            if p + i in self.held:
                self.set(p + i, tokens[i])
        self.call("end_extend")

    def set(self, p: int, token: Token) -> None:
        self.call("set", p, pointer(token.k), pointer(token.v))

    def get(self, p: int) -> Token:
        shift, token = ctypes.c_int32(), ctypes.c_int32()
        self.call("token", p, ctypes.byref(shift), ctypes.byref(token))
        k, v = (np.zeros(elements(self.layers, part), np.float32) for part in (1, 2))
        self.call("get", p, pointer(k), pointer(v))
        return Token(token.value, shift.value, k, v)

    def page(self, page: int, layer: int, head: int) -> tuple[ByteArray, ByteArray]:
        """The bytes of its rows, [N_PAGE, bytes of a row], of K and of V."""
        _, n_k, n_v = self.layers[layer]
        k, v = (
            quantize(np.zeros((N_PAGE, n), np.float32), TYPES[self.kind]).view(np.uint8)
            for n in (n_k, n_v)
        )
        self.call("page", page, layer, head, pointer(k), pointer(v))
        return k, v

    def page_bytes(self) -> int:
        """Of a page: a header, and its two parts with their padding."""

        def padded(part: int) -> int:
            rows = np.zeros(elements(self.layers, part), np.float32)
            size = quantize(rows, TYPES[self.kind]).nbytes * N_PAGE
            return -(-size // PADDING) * PADDING

        return PADDING + padded(1) + padded(2)


def assert_holds(archive: Archive, tokens: dict[int, Token]) -> None:
    """Exactly these tokens, rounded to the type of the archive."""
    assert [*archive.held] == sorted(tokens)
    for p, token in tokens.items():
        found = archive.get(p)
        assert (found.id, found.shift) == (token.id, token.shift)
        np.testing.assert_array_equal(found.k, rounded(token.k, archive.kind))
        np.testing.assert_array_equal(found.v, rounded(token.v, archive.kind))
