"""What the processor can do, and which of our kernels attends on it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# By the names of ggml those of Linux.
_SETS = {
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "F16C": "f16c",
    "FMA": "fma",
    "AVX2": "avx2",
    "BMI2": "bmi2",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
_AVX2 = {"avx2", "fma", "f16c"}
_ARM = ("aarch64", "arm64")


def instruction_sets() -> tuple[str, ...]:
    """Those of this processor that ggml or our kernels use, as Linux calls them.

    Returns:
        None at all on a system that does not tell.
    """
    if _CPUINFO.exists():
        # x86 calls them flags, ARM features
        with _CPUINFO.open() as file:
            line = next((line for line in file if line.startswith(("flags", "Features"))), "")
        there = line.partition(":")[2].split()
    else:
        there = ["asimd"] if platform.machine() in _ARM else []
    return tuple(name for name in _SETS.values() if name in there)


def attention_kernel(sets: tuple[str, ...]) -> str | None:
    """The kernel for rows whose length it divides, of every type, as h2o-kernel.cpp chooses it.

    Args:
        sets: `instruction_sets()`.

    Returns:
        Its name as `attention` takes it, or None where the instructions are not known.
    """
    if "asimd" in sets:
        return "neon"
    if set(sets) >= _AVX2:
        return "avx512" if "avx512f" in sets else "avx2"
    return "portable" if sets else None


def used_sets(built_for: str) -> tuple[str, ...]:
    """Instructions that ggml was compiled to use, as Linux calls them.

    Args:
        built_for: what llama_print_system_info says, "CPU : AVX2 = 1 | ...".
    """
    used = re.findall(r"(\w+) = 1\b", built_for)
    return tuple(_SETS[name] for name in used if name in _SETS)


def missing_sets(built_for: str, sets: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `used_sets` that this processor lacks.

    Args:
        built_for: as above.
        sets: `instruction_sets()`; nothing is missing if they are not known.
    """
    return tuple(name for name in used_sets(built_for) if sets and name not in sets)
