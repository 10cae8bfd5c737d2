"""Available and used memory, and returning freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


def available_bytes() -> int:
    """Return the memory that can be allocated without swapping, within a container's limit."""
    left = (limit.left for limit in memory_limits())
    return min((psutil.virtual_memory().available, *left))


def total_bytes() -> int:
    """Return the memory of the machine, or the limit of the container."""
    return min((psutil.virtual_memory().total, *(limit.bytes for limit in memory_limits())))


def spare_bytes() -> int:
    """Return the memory that can be allocated while this process stays in RAM.

    The system counts the mapped weights of a loaded model as available, although every token needs
    them.
    """
    # not on macOS and Windows
    mapped = int(getattr(psutil.Process().memory_info(), "shared", 0))
    return max(0, available_bytes() - mapped)


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of a control group, and what is left of it; cached files count as free."""

    bytes: int
    left: int


# Linux's control groups, which psutil does not know.
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# A group's files with its limit and its use, and the names of cached files in its statistics.
_FILES = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_FILES_OF_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def memory_limits() -> list[MemoryLimit]:
    """Return the limits of this process's group and of its parents; none on other systems.

    A container may see its own group as the root, and its path as seen from outside: groups that
    do not exist are skipped.
    """
    found: list[MemoryLimit] = []
    lines = _OWN.read_text().splitlines() if _OWN.exists() else []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, files = _ROOT, _FILES
        elif "memory" in controllers.split(","):
            root, files = _ROOT / "memory", _FILES_OF_VERSION_1
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                found.append(_limit_of(root / each, *files))
    return found


def _limit_of(folder: Path, limit_file: str, used_file: str, cached: Sequence[str]) -> MemoryLimit:
    limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
    statistics = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    n_cached = sum(int(n) for name, n in statistics if name in cached)
    return MemoryLimit(limit, max(0, limit - used + n_cached))


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


# <malloc.h>
_M_ARENA_MAX = -8


def share_freed_memory() -> None:
    """Use one arena of glibc's malloc for all threads; call it before threads are started.

    Memory that was freed in one arena is not reused by threads of another, so over hours each of a
    server's arenas grows to its own maximum. MALLOC_ARENA_MAX overrides this.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Return freed pages to the system, if the C library can.

    glibc only returns the end of its heap. Freed blocks between used ones accumulate in a server,
    because requests differ in length.
    """
    if hasattr(psutil, "heap_trim"):
        psutil.heap_trim()
