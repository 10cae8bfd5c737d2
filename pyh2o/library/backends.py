"""Functions of ggml for devices and types that llama_cpp and `_native` do not have."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as loader

# enum ggml_backend_dev_type
_CPU, _GPU, _INTEGRATED_GPU = range(3)

_Pointer = ctypes.c_void_p
# enum ggml_type: f32, f16 and bf16
F32 = 0
_FLOATS = (F32, 1, 30)


class Traits(ctypes.Structure):
    """The first fields of struct ggml_type_traits."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, _Pointer, _Pointer, ctypes.c_int64)),
    )


def ggml_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of ggml with the C types of its result and arguments."""
    # item lookup returns a new object, so llama_cpp can declare other types for the same function
    function = loader._lib[name]
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


_reg_by_name = ggml_function("ggml_backend_reg_by_name", _Pointer, ctypes.c_char_p)
_address_in = ggml_function(
    "ggml_backend_reg_get_proc_address", _Pointer, _Pointer, ctypes.c_char_p
)
_reg_count = ggml_function("ggml_backend_reg_dev_count", ctypes.c_size_t, _Pointer)
_reg_device = ggml_function("ggml_backend_reg_dev_get", _Pointer, _Pointer, ctypes.c_size_t)
_count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t)
_device = ggml_function("ggml_backend_dev_get", _Pointer, ctypes.c_size_t)
_type = ggml_function("ggml_backend_dev_type", ctypes.c_int, _Pointer)
_description = ggml_function("ggml_backend_dev_description", ctypes.c_char_p, _Pointer)
_memory = ggml_function(
    "ggml_backend_dev_memory",
    None,
    _Pointer,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)


_traits = ggml_function("ggml_get_type_traits", ctypes.POINTER(Traits), ctypes.c_int)


class _Place(ctypes.Structure):
    """Dl_info, of which only the library's file is used."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", _Pointer),
        ("symbol", ctypes.c_char_p),
        ("address", _Pointer),
    )


class Device:
    """A processor of this machine or of another one."""

    def __init__(self, address: int) -> None:
        self.address = address

    @property
    def name(self) -> str:
        """Name of the processor, or address of its server."""
        return str(_description(self.address).decode())

    def free_bytes(self) -> int:
        """Return the free memory that the device reports; a CPU reports all of it."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _memory(self.address, ctypes.byref(free), ctypes.byref(total))
        return free.value


def traits_of(number: int) -> Traits:
    """Return the traits of a type; `to_float` is null for f32."""
    traits: Traits = _traits(number).contents
    return traits


def type_name(number: int) -> str:
    """Return the common name of a type, such as Q4_K."""
    return str(traits_of(number).name.decode().upper())


def is_float(number: int) -> bool:
    return number in _FLOATS


@functools.cache
def weight_types() -> tuple[int, ...]:
    """Return all types of weights that can be multiplied."""
    numbers = range(loader.GGML_TYPE_COUNT)
    return tuple(n for n in numbers if is_float(n) or traits_of(n).to_float)


def local_devices() -> list[Device]:
    """Return the GPUs of this machine; integrated ones only if there are no others."""
    return discrete_gpus() or _devices_of_kind(_INTEGRATED_GPU)


def discrete_gpus() -> list[Device]:
    """Return the GPUs with separate memory, and those of Apple."""
    return _devices_of_kind(_GPU)


def cpu() -> Device:
    return _devices_of_kind(_CPU)[0]


def _devices_of_kind(kind: int) -> list[Device]:
    found = [Device(_device(i)) for i in range(_count())]
    return [each for each in found if _type(each.address) == kind]


def cpu_library() -> str:
    """Return the library of the CPU backend; a wheel has one for each kind of processor."""
    place = _Place()
    ctypes.CDLL(None).dladdr(_Pointer(_reg_by_name(b"CPU")), ctypes.byref(place))
    return os.fsdecode(place.file)


def devices_of(registry: int) -> list[Device]:
    """Return the devices of a backend, by the address of its registry."""
    return [Device(_reg_device(registry, i)) for i in range(_reg_count(registry))]


def backend_function(backend: str, name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of a backend; None if the build does not have the backend."""
    registry = _reg_by_name(backend.encode())
    if registry is None:
        return None
    address = _address_in(registry, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address)
