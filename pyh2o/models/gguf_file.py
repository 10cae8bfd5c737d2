"""The header of a GGUF file as ggml reads it: keys with their values, and tensors.

The package `gguf` has a reader in Python that takes some 200 times as long for a vocabulary.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._native import ffi, lib
from ..errors import ModelError
from ..library.backends import ggml_function

# enum gguf_type
UINT16, UINT32, INT32, FLOAT32, STRING, ARRAY = 2, 4, 5, 6, 8, 9


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


_Pointer = ctypes.c_void_p
_Index = ctypes.c_int64
_open = ggml_function("gguf_init_from_file", _Pointer, ctypes.c_char_p, _InitParams)
_close = ggml_function("gguf_free", None, _Pointer)
_find = ggml_function("gguf_find_key", _Index, _Pointer, ctypes.c_char_p)
_kind = ggml_function("gguf_get_kv_type", ctypes.c_int, _Pointer, _Index)
_data = ggml_function("gguf_get_val_data", _Pointer, _Pointer, _Index)
_text = ggml_function("gguf_get_val_str", ctypes.c_char_p, _Pointer, _Index)
_array_kind = ggml_function("gguf_get_arr_type", ctypes.c_int, _Pointer, _Index)
_array_length = ggml_function("gguf_get_arr_n", ctypes.c_size_t, _Pointer, _Index)
_array_data = ggml_function("gguf_get_arr_data", _Pointer, _Pointer, _Index)
_data_offset = ggml_function("gguf_get_data_offset", ctypes.c_size_t, _Pointer)
_count = ggml_function("gguf_get_n_tensors", _Index, _Pointer)
_name = ggml_function("gguf_get_tensor_name", ctypes.c_char_p, _Pointer, _Index)
_size = ggml_function("gguf_get_tensor_size", ctypes.c_size_t, _Pointer, _Index)
_ggml_type = ggml_function("gguf_get_tensor_type", ctypes.c_int, _Pointer, _Index)
_offset = ggml_function("gguf_get_tensor_offset", ctypes.c_size_t, _Pointer, _Index)

_NUMBERS: dict[int, Any] = {
    UINT16: ctypes.c_uint16,
    UINT32: ctypes.c_uint32,
    FLOAT32: ctypes.c_float,
}

# In the name of the first file of a model in several files.
_FIRST_FILE = "-00001-of-"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the header: offsets in the file, and ggml's number of its type."""

    name: str
    start: int
    end: int
    kind: int


class GgufFile:
    """The header of a file; a context manager that closes it."""

    def __init__(self, path: Path) -> None:
        self._file = _open(os.fsencode(path), _InitParams(no_alloc=True, context=None))
        if not self._file:
            raise ModelError(f"{path} cannot be read: it is missing or damaged")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *error: object) -> None:
        _close(self._file)

    def kind(self, key: str) -> int | None:
        """Return GGUF's number of the type of a value; None if the key is missing."""
        index = self._find(key)
        return None if index < 0 else int(_kind(self._file, index))

    def text(self, key: str) -> str | None:
        """Return a string; None if the key is missing or of another type."""
        if self.kind(key) != STRING:
            return None
        return bytes(_text(self._file, self._find(key))).decode(errors="replace")

    def number(self, key: str) -> Any:
        """Return a float, or an unsigned integer of 16 or 32 bits; None as in `text`."""
        kind = _NUMBERS.get(self.kind(key) or 0)
        return kind and kind.from_address(_data(self._file, self._find(key))).value

    def numbers(self, key: str) -> list[int]:
        """Return an array of integers of 32 bits, or the only one; [] as in `text`.

        They are unsigned, as llama.cpp reads them.
        """
        index = self._find(key)
        if self.kind(key) != ARRAY:
            number = self.number(key)
            return [] if number is None else [number]
        kind, n = _array_kind(self._file, index), _array_length(self._file, index)
        if kind not in (UINT32, INT32) or not n:
            return []
        return list((ctypes.c_uint32 * n).from_address(_array_data(self._file, index)))

    def repeated_token(self) -> int | None:
        """Return the first token with the same text as an earlier one, or None."""
        token = ffi.new("int64_t *")
        file = ffi.cast("struct gguf_context *", self._file)
        if lib.llama_h2o_find_repeated_token(file, token) != lib.LLAMA_H2O_OK:
            raise MemoryError("there is too little memory for the model's vocabulary")
        return None if token[0] < 0 else int(token[0])

    def tensors(self) -> Iterator[Tensor]:
        begin = _data_offset(self._file)
        for i in range(_count(self._file)):
            name = _name(self._file, i).decode(errors="replace")
            start = begin + _offset(self._file, i)
            yield Tensor(name, start, start + _size(self._file, i), _ggml_type(self._file, i))

    def _find(self, key: str) -> int:
        return int(_find(self._file, key.encode()))


def files_of(path: Path) -> list[Path]:
    """Return all files of the model with this first file."""
    # not "*": another model's names may begin and end like this one's
    pattern = glob.escape(path.name).replace(_FIRST_FILE, f"-{5 * '[0-9]'}-of-")
    return sorted(path.parent.glob(pattern))
