"""What can run layers beside the CPU, and how many layers fit there."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, cast

from .._native import ffi, lib
from ..system.threads import physical_cores
from . import GPU_BACKENDS, __version__, backends, build_info
from .machine import built_for, cpu_name, used_sets
from .rpc import places_of_layers

MARGIN = 2**30
"""Bytes of each GPU that are left for what llama.cpp computes in, and for others."""


def gpu_names() -> list[str]:
    """The GPUs that layers can run on."""
    names = takewhile(bool, map(lib.llama_h2o_device_name, count()))
    return [ffi.string(name).decode() for name in names]


def why_no_gpu() -> str | None:
    """Why layers cannot run on a GPU, and what to do about it; None where they can."""
    if gpu_names():
        return None
    built = [name for name in GPU_BACKENDS if name in _backends()]
    if not built:
        return (
            "this build has no GPU backend: install with "
            'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DGGML_CUDA=ON" for an NVIDIA GPU; running on the CPU'
        )
    return (
        f"the {built[0]} backend finds no GPU: install or update its driver (for CUDA, "
        "`nvidia-smi` must list the GPU); running on the CPU"
    )


def machine_facts(threads: int, gpu_layers: int = 0) -> dict[str, Any]:
    """The machine and the versions of what runs on it; GPUs where layers run on them."""
    build = build_info()
    return {
        "cpu": cpu_name(),
        "instructions": used_sets(built_for()),
        "cores": physical_cores(),
        "threads": threads,
        "gpus": gpu_names() if gpu_layers else [],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "pyh2o": __version__,
        "llama_cpp_commit": build.get("llama_cpp_commit"),
        "patches": build.get("patches"),
    }


def has_own_kernels() -> bool:
    """Whether the GPU has kernels of ours, which attend in the place of flash attention."""
    return why_no_gpu() is None and "cuda" in _backends()


def _backends() -> list[str]:
    return list(cast(list[str], build_info()["backends"]))


@dataclass(frozen=True)
class Gpu:
    """A GPU with so many free bytes."""

    name: str
    free: int


@dataclass(frozen=True)
class Fit:
    """What goes on the GPUs.

    Attributes:
        gpus: all there are.
        n_layers: as llama.cpp counts them: the last ones of the model, the output being one more.
        n_in_all: layers of the model, the output included.
        bytes: of their weights and caches.
    """

    gpus: tuple[Gpu, ...]
    n_layers: int
    n_in_all: int
    bytes: int

    def __str__(self) -> str:
        names = ", ".join(gpu.name for gpu in self.gpus)
        free = sum(gpu.free for gpu in self.gpus)
        if not self.n_layers:
            return f"no layer fits on {names} ({_gib(free)} GiB free): running on the CPU"
        return (
            f"{self.n_layers} of {self.n_in_all} layers on {names} ({_gib(self.bytes)} of "
            f"{_gib(free)} GiB)"
        )


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; integrated ones, which share its memory, are none of them."""
    return tuple(Gpu(each.name, each.free_bytes()) for each in backends.discrete_gpus())


def fit_layers(layers: Sequence[int], gpus: Sequence[Gpu], margin: int = MARGIN) -> Fit:
    """The most layers that fit.

    llama.cpp gives the last layers to the GPUs, in their order and by their free memory, so it may
    be one of several GPUs that has no room for more.

    Args:
        layers: bytes of each on a GPU, weights and cache; the last one is the output.
        gpus: one at least.
        margin: bytes of each that stay free.
    """
    n_in_all = len(layers)
    for n_layers in range(n_in_all, 0, -1):
        used = [0] * len(gpus)
        shares = [float(gpu.free or 1) for gpu in gpus]
        places = [*places_of_layers(n_in_all - 1, n_layers, shares), len(gpus) - 1]
        for size, place in zip(layers, places, strict=True):
            if place is not None:
                used[place] += size
        if all(size <= gpu.free - margin for size, gpu in zip(used, gpus, strict=True) if size):
            return Fit(tuple(gpus), n_layers, n_in_all, sum(used))
    return Fit(tuple(gpus), 0, n_in_all, 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
