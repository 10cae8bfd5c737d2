"""GPUs, and how many layers fit on them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import accumulate, count, takewhile
from typing import Any, cast

from .._native import ffi, lib
from ..system.threads import physical_cores
from . import GPU_BACKENDS, __version__, build_info
from .backends import Device
from .machine import built_for, cpu_name, used_sets

MARGIN = 2**30
"""Bytes of each GPU that are reserved for compute buffers and other programs."""


def gpu_names() -> list[str]:
    """Return the names of the GPUs that can run layers."""
    names = takewhile(bool, map(lib.llama_h2o_device_name, count()))
    return [ffi.string(name).decode() for name in names]


def why_no_gpu() -> str | None:
    """Return why no GPU can run layers, and the cure; None if one can."""
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
    """Return facts about the machine and versions; GPUs only if layers run on them."""
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
    """Return whether the GPU has our kernels, which replace flash attention."""
    return why_no_gpu() is None and "cuda" in _backends()


def _backends() -> list[str]:
    return list(cast(list[str], build_info()["backends"]))


def fit_layers(layers: Sequence[int], gpus: Sequence[Device]) -> tuple[int, str]:
    """Return how many layers fit on GPUs, counting the output as one, and a line for the user.

    llama.cpp distributes the last layers over the GPUs by their free memory. `layers` are the bytes
    of weights and cache of each layer; the last one is the output.
    """
    free = sum(gpu.free_bytes() for gpu in gpus)
    names = ", ".join(gpu.name for gpu in gpus)
    used = [*accumulate(reversed(layers))]
    n_layers = sum(size <= free - MARGIN * len(gpus) for size in used)
    if n_layers == 0:
        return 0, f"no layer fits on {names} ({_gib(free)} GiB free): running on the CPU"
    sizes = f"{_gib(used[n_layers - 1])} of {_gib(free)} GiB"
    return n_layers, f"{n_layers} of {len(layers)} layers on {names} ({sizes})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
