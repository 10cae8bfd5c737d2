"""Facts about the machine and the program, for who reads the figures elsewhere."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pyh2o

from .cgroup import memory_limits
from .memory import status_bytes
from .processor import used_sets
from .threads import physical_cores

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def machine_facts(threads: int, gpu_layers: int = 0) -> dict[str, Any]:
    """The machine and the versions of what runs on it; GPUs where layers run on them."""
    build = pyh2o.build_info()
    return {
        "cpu": cpu_name(),
        "instructions": used_sets(built_for()),
        "cores": physical_cores(),
        "threads": threads,
        "gpus": _gpu_names() if gpu_layers else [],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "pyh2o": pyh2o.__version__,
        "llama_cpp_commit": build.get("llama_cpp_commit"),
        "patches": build.get("patches"),
    }


def built_for() -> str:
    """What llama.cpp says of its build, "CPU : AVX2 = 1 | ..."."""
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    import llama_cpp

    return str(llama_cpp.llama_print_system_info().decode())


def _gpu_names() -> list[str]:
    # Imported here because it loads llama.cpp, which `--help` must not wait for.
    from .devices import gpu_names

    return gpu_names()


def cpu_name() -> str:
    """The processor's model."""
    if _CPUINFO.exists():
        with _CPUINFO.open() as file:  # line by line: Linux takes a while for many processors
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    return platform.processor() or platform.machine()


def total_bytes() -> int | None:
    """The machine's memory; None where the system does not tell."""
    return _meminfo("MemTotal") or _pages("SC_PHYS_PAGES")


def available_bytes() -> int | None:
    """Memory that can be taken without swapping; None where the system does not tell.

    In a container that is no more than its limit leaves.
    """
    available = _meminfo("MemAvailable") or _pages("SC_AVPHYS_PAGES")
    left = [limit.left for limit in memory_limits()]
    return min(left if available is None else [available, *left], default=None)


def _meminfo(name: str) -> int | None:
    """What Linux says of its memory, in bytes."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _pages(name: str) -> int | None:
    """What other systems say of theirs, in bytes."""
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def spare_bytes() -> int | None:
    """Memory that can be taken while what this process uses stays in RAM; None if not known.

    The weights of a loaded model are a mapped file, which the system calls available: it could read
    them again, for every token.
    """
    available = available_bytes()
    if available is None:
        return None
    return max(0, available - (status_bytes("RssFile") or 0))
