"""The header of a GGUF file as ggml reads it: keys with their values, and tensors."""

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
    """struct gguf_init_params."""

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

# Every file of a model in several says which one it is: this is the first.
_FIRST_FILE = "-00001-of-"


@dataclass(frozen=True)
class Tensor:
    """What the header says of a tensor.

    Attributes:
        size: bytes.
        start: where it begins in the file, in bytes.
        kind: ggml's number of its type.
    """

    name: str
    size: int
    start: int
    kind: int

    @property
    def end(self) -> int:
        """Where it ends in the file, in bytes."""
        return self.start + self.size


class GgufFile:
    """The header of a file; to be closed, as `with` does. Values are asked for with their type.

    Args:
        path: of the file.

    Raises:
        ModelError: the file is missing, or ggml cannot read its header.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(os.fsencode(path), _InitParams(no_alloc=True, context=None))
        if not self._file:
            raise ModelError(f"{path} cannot be read: it is missing or damaged")

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *error: object) -> None:
        _close(self._file)

    def kind(self, key: str) -> int | None:
        """GGUF's number of the type of a key's value; None if there is no such key."""
        index = self._find(key)
        return None if index < 0 else int(_kind(self._file, index))

    def text(self, key: str) -> str | None:
        """A key's text; None if there is none."""
        if self.kind(key) != STRING:
            return None
        return bytes(_text(self._file, self._find(key))).decode(errors="replace")

    def number(self, key: str) -> int | None:
        """A key's whole number, without sign and of 32 bits; None if there is none."""
        number: int | None = self._value(key, UINT32, ctypes.c_uint32)
        return number

    def real(self, key: str) -> float | None:
        """A key's floating point number of 32 bits; None if there is none."""
        number: float | None = self._value(key, FLOAT32, ctypes.c_float)
        return number

    def n_files(self) -> int:
        """Files of the model that this one says there are."""
        number: int | None = self._value("split.count", UINT16, ctypes.c_uint16)
        return 1 if number is None else number

    def numbers(self, key: str) -> list[int] | None:
        """A key's whole numbers of 32 bits: a single one or an array; None if there are none."""
        index = self._find(key)
        if index < 0 or _kind(self._file, index) != ARRAY:
            number = self.number(key)
            return None if number is None else [number]
        kind, n = _array_kind(self._file, index), _array_length(self._file, index)
        if kind not in (UINT32, INT32) or not n:
            return None
        return list((ctypes.c_uint32 * n).from_address(_array_data(self._file, index)))

    def repeated_token(self) -> int | None:
        """The first token with the text of an earlier one; None if there is none.

        Raises:
            MemoryError: there is too little to look.
        """
        token = ffi.new("int64_t *")
        file = ffi.cast("struct gguf_context *", self._file)
        if lib.llama_h2o_find_repeated_token(file, token) != lib.LLAMA_H2O_OK:
            raise MemoryError("there is too little memory for the model's vocabulary")
        return None if token[0] < 0 else int(token[0])

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order of the file."""
        begin = _data_offset(self._file)
        for i in range(_count(self._file)):
            name = _name(self._file, i).decode(errors="replace")
            start = begin + _offset(self._file, i)
            yield Tensor(name, _size(self._file, i), start, _ggml_type(self._file, i))

    def _find(self, key: str) -> int:
        return int(_find(self._file, key.encode()))

    def _value(self, key: str, kind: int, of: Any) -> Any:
        if self.kind(key) != kind:
            return None
        return of.from_address(_data(self._file, self._find(key))).value


def files_of(path: Path) -> list[Path]:
    """All files of a model, of which this is the first."""
    # not "*": the names of another model may begin like this one's and end alike
    pattern = glob.escape(path.name).replace(_FIRST_FILE, f"-{5 * '[0-9]'}-of-")
    return sorted(path.parent.glob(pattern))
