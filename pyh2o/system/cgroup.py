"""The memory that a container, or a service of the system, may take: Linux's control groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")

# Without a limit version 1 says the most whole pages that fit 63 bits.
_UNLIMITED = 2**62


@dataclass(frozen=True)
class _Version:
    """What the files of one version are called, and the lines of the one with statistics.

    Attributes:
        folder: below the root, of all groups.
        limit, used: files that hold bytes.
        cached: lines about files in memory, which the system drops when room is needed.
    """

    folder: str
    limit: str
    used: str
    cached: tuple[str, str]


_V2 = _Version("", "memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Version(
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


@dataclass(frozen=True)
class MemoryLimit:
    """A limit that this process is under.

    Attributes:
        bytes: that all processes of the group may take.
        left: bytes of it that can still be taken; what files occupy in memory counts as free.
    """

    bytes: int
    left: int


def memory_limits() -> list[MemoryLimit]:
    """The limits of this process's group and of those around it; none on other systems."""
    return [limit for version, folder in _groups() if (limit := _limit_of(version, folder))]


def _groups() -> Iterator[tuple[_Version, Path]]:
    """The groups that this process is in, each with those around it.

    A container may see its own group as the outermost one, and its path as it is outside: what is
    not there is passed over.
    """
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            yield version, _ROOT / version.folder / each


def _limit_of(version: _Version, folder: Path) -> MemoryLimit | None:
    with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
        limit = int((folder / version.limit).read_text())
        if limit < _UNLIMITED:
            used = int((folder / version.used).read_text()) - _cached_bytes(version, folder)
            return MemoryLimit(limit, max(0, limit - used))
    return None


def _cached_bytes(version: _Version, folder: Path) -> int:
    statistics = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(value) for name, value in statistics if name in version.cached)
