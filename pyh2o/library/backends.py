"""ggml's devices and types, as far as neither llama_cpp nor `_native` tells of them."""

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
    """struct ggml_type_traits, as far as it is used."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, _Pointer, _Pointer, ctypes.c_int64)),
    )


def ggml_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of ggml by its name, with the C types of what it returns and takes."""
    # Looked up by item, each is an object of its own: llama_cpp may declare the same otherwise.
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
    """Dl_info: what lies at an address, of which only the library's file is looked at."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", _Pointer),
        ("symbol", ctypes.c_char_p),
        ("address", _Pointer),
    )


class Device:
    """What computes, on this machine or another.

    Attributes:
        address: of ggml's device.
    """

    def __init__(self, address: int) -> None:
        self.address = address

    @property
    def name(self) -> str:
        """The processor, or the address of the server that it is behind."""
        return str(_description(self.address).decode())

    def free_bytes(self) -> int:
        """Memory that it says it has left; for a CPU that is all there is."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _memory(self.address, ctypes.byref(free), ctypes.byref(total))
        return free.value


def traits_of(number: int) -> Traits:
    """What ggml says of one of its types; `to_float` is null for f32."""
    traits: Traits = _traits(number).contents
    return traits


def type_name(number: int) -> str:
    """A type as people write it, such as Q4_K."""
    return str(traits_of(number).name.decode().upper())


def is_float(number: int) -> bool:
    """Whether its numbers are not in blocks."""
    return number in _FLOATS


@functools.cache
def weight_types() -> tuple[int, ...]:
    """All types of weights that can be multiplied."""
    numbers = range(loader.GGML_TYPE_COUNT)
    return tuple(n for n in numbers if is_float(n) or traits_of(n).to_float)


def local_devices() -> list[Device]:
    """This machine's GPUs, integrated ones only if there are no others; its CPU is none of them."""
    return discrete_gpus() or _devices_of_kind(_INTEGRATED_GPU)


def discrete_gpus() -> list[Device]:
    """This machine's GPUs that have memory of their own, or the machine's (Apple)."""
    return _devices_of_kind(_GPU)


def cpu() -> Device:
    """This machine's CPU."""
    return _devices_of_kind(_CPU)[0]


def _devices_of_kind(kind: int) -> list[Device]:
    found = [Device(_device(i)) for i in range(_count())]
    return [each for each in found if _type(each.address) == kind]


def cpu_library() -> str:
    """The file that computes on the CPU: a wheel has one for each kind of processor."""
    place = _Place()
    ctypes.CDLL(None).dladdr(_Pointer(_reg_by_name(b"CPU")), ctypes.byref(place))
    return os.fsdecode(place.file)


def devices_of(registry: int) -> list[Device]:
    """The devices of a backend, from the address of its registry."""
    return [Device(_reg_device(registry, i)) for i in range(_reg_count(registry))]


def backend_function(backend: str, name: str, result: Any, *arguments: Any) -> Any:
    """A function that only one backend has; None if the build has not got that backend."""
    registry = _reg_by_name(backend.encode())
    if registry is None:
        return None
    address = _address_in(registry, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address)
