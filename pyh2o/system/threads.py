"""How many threads to compute with."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
# Where a container sees its own limit: of version 2, and of version 1.
_CGROUP = Path("/sys/fs/cgroup")
_TIMES = Path("/proc/stat")
_LOOK = 0.2  # seconds for which it is seen how busy the machine is


@dataclass(frozen=True)
class Cores:
    """The machine's cores, and what this process may use of them.

    Attributes:
        physical: of the machine.
        logical: their threads; CPUs, as the system counts.
        allowed: CPUs that this process may run on.
        quota: CPUs that a container's limit comes to; None for no limit.
        used: threads that pyh2o takes by itself.
    """

    physical: int
    logical: int
    allowed: int
    quota: float | None
    used: int


def count_cores() -> Cores:
    """The machine's cores, and what this process may use of them."""
    logical = os.cpu_count() or 1
    has_affinity = hasattr(os, "sched_getaffinity")
    return Cores(
        physical=len({_sibling_list(cpu) for cpu in range(logical)})
        if has_affinity
        else _sysctl("hw.physicalcpu") or logical,
        logical=logical,
        allowed=len(os.sched_getaffinity(0)) if has_affinity else logical,
        quota=_cpu_quota(),
        used=physical_cores(),
    )


def physical_cores() -> int:
    """Cores this process may keep busy, counting the two threads of one core once.

    Attention and matrix products are bound by memory and vector units, which sibling threads
    share: a second thread on a core only adds waiting. So does a thread that a container's limit
    makes wait, or one on a slow core of an Apple chip, because all threads wait for the last one.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len({_sibling_list(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = _fast_cores() or os.cpu_count() or 1
    quota = _cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def _sibling_list(cpu: int) -> str:
    """The threads of the core that has this CPU, or the CPU itself where that is not known."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _fast_cores() -> int | None:
    """Performance cores of an Apple chip, or None for another machine."""
    return _sysctl("hw.perflevel0.physicalcpu")


def _sysctl(name: str) -> int | None:
    """A number that macOS tells; None for another system."""
    query = ["sysctl", "-n", name]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def _cpu_quota() -> float | None:
    """CPUs that the container's limit comes to; None for no limit, or none that is known."""
    try:
        if (limit := _CGROUP / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = (
                (_CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def busy_cpus() -> float | None:
    """CPUs that others keep busy just now, or another virtual machine; None if not known."""
    try:
        before = _ticks()
        time.sleep(_LOOK)
        idle, total = (now - then for now, then in zip(_ticks(), before, strict=True))
        return max(0.0, (os.cpu_count() or 1) * (1 - idle / total))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _ticks() -> tuple[int, int]:
    """Of all CPUs: those in which nothing was to be done, and all of them."""
    with _TIMES.open() as file:
        # user, nice, system, idle, waiting for disks, interrupts (two kinds), stolen
        ticks = [int(number) for number in file.readline().split()[1:9]]
    return sum(ticks[3:5]), sum(ticks)
