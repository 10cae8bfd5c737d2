"""The processor and its instruction sets."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# Names of instruction sets in ggml, and in /proc/cpuinfo.
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
_ARM = ("aarch64", "arm64")


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> tuple[str, ...]:
    """Return Linux's names of this processor's instruction sets that ggml or our kernels use.

    They are unknown on other systems, except for NEON.
    """
    if _CPUINFO.exists():
        there = _cpuinfo("flags", "Features").split()  # x86, ARM
    else:
        there = ["asimd"] if platform.machine() in _ARM else []
    return tuple(name for name in _SETS.values() if name in there)


def built_for() -> str:
    """Return llama.cpp's description of its build, "CPU : AVX2 = 1 | ..."."""
    # imported here because it loads llama.cpp, which `--help` must not wait for
    import llama_cpp

    return str(llama_cpp.llama_print_system_info().decode())


def used_sets(built_for: str) -> tuple[str, ...]:
    """Return Linux's names of the instruction sets that ggml was compiled for."""
    used = re.findall(r"(\w+) = 1\b", built_for)
    return tuple(_SETS[name] for name in used if name in _SETS)


def missing_sets(built_for: str, sets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the `used_sets` that this processor lacks; none if its `sets` are unknown."""
    return tuple(name for name in used_sets(built_for) if sets and name not in sets)


def _cpuinfo(*names: str) -> str:
    """Return the first value of /proc/cpuinfo with one of these names, or ""."""
    if _CPUINFO.exists():
        with _CPUINFO.open() as file:  # by lines: Linux is slow to list many processors
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in names:
                    return value.strip()
    return ""
