"""What can run layers beside the CPU."""

from __future__ import annotations

from typing import cast

from .._native import ffi, lib
from ..library import GPU_BACKENDS, build_info


def gpu_names() -> list[str]:
    """The GPUs that layers can run on."""
    n: int = lib.llama_h2o_n_devices()
    return [ffi.string(lib.llama_h2o_device_name(i)).decode() for i in range(n)]


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


def has_own_kernels() -> bool:
    """Whether the GPU has kernels of ours, which attend in the place of flash attention."""
    return why_no_gpu() is None and "cuda" in _backends()


def _backends() -> list[str]:
    return list(cast(list[str], build_info()["backends"]))
