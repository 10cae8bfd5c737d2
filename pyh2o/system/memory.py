"""Memory: what is left of it, what a process uses, and giving back what was freed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

# -------------------------------------------------------------------------------------------------
# What is left
# -------------------------------------------------------------------------------------------------


def available_bytes() -> int:
    """Memory that can be taken without swapping; in a container no more than its limit leaves."""
    left = (limit.left for limit in memory_limits())
    return min((psutil.virtual_memory().available, *left))


def total_bytes() -> int:
    """Memory of the machine; in a container no more than its limit."""
    return min((psutil.virtual_memory().total, *(limit.bytes for limit in memory_limits())))


def spare_bytes() -> int:
    """Memory that can be taken while what this process uses stays in RAM.

    The weights of a loaded model are a mapped file, which the system calls available: it could read
    them again, for every token.
    """
    # 0 where the system does not tell
    mapped = int(getattr(psutil.Process().memory_info(), "shared", 0))
    return max(0, available_bytes() - mapped)


@dataclass(frozen=True)
class MemoryLimit:
    """A limit that this process is under, because it is in a container or a service.

    Attributes:
        bytes: that all processes of its control group may take.
        left: bytes of it that can still be taken; what files occupy in memory counts as free.
    """

    bytes: int
    left: int


# Linux's control groups.
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# A group's files of its limit and use, and the names of cached files in its statistics.
_FILES = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_FILES_OF_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def memory_limits() -> list[MemoryLimit]:
    """The limits of this process's group and of those around it; none on other systems.

    A container may see its own group as the outermost one, and its path as it is outside: what is
    not there is passed over.
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
            with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
                found.append(_limit_of(root / each, *files))
    return found


def _limit_of(folder: Path, limit_file: str, used_file: str, cached: Sequence[str]) -> MemoryLimit:
    limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
    statistics = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    n_cached = sum(int(n) for name, n in statistics if name in cached)
    return MemoryLimit(limit, max(0, limit - used + n_cached))


# -------------------------------------------------------------------------------------------------
# What is used
# -------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(psutil.Process().memory_info().rss)


# -------------------------------------------------------------------------------------------------
# What was freed
# -------------------------------------------------------------------------------------------------

# The number of a setting of glibc's malloc.
_M_ARENA_MAX = -8


def share_freed_memory() -> None:
    """Let what one thread has freed serve all others; to be called before there are many threads.

    The malloc of glibc has parts, up to eight for each processor, among which it divides the
    threads. What was freed in one part is not used by the others, so each grows to the most that
    its threads ever had at once, which takes a server hours. Here all threads get one part, unless
    the environment says how many they get (MALLOC_ARENA_MAX). Elsewhere than with glibc this does
    nothing.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Let the system have what was freed, as far as it is whole pages.

    By itself glibc gives back the end of its memory alone. What was freed between pieces that are
    still used waits there for others that fit, and in a server, whose requests are of all lengths,
    there is more of it from hour to hour. Where the C library cannot do it this does nothing.
    """
    if hasattr(psutil, "heap_trim"):
        psutil.heap_trim()
