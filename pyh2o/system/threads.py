"""How many threads to compute with."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_TOPOLOGY = Path("/sys/devices/system/cpu")
# Where a container sees its own limit.
_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> int:
    """Cores this process may keep busy, counting the two threads of one core once.

    Attention and matrix products are bound by memory and vector units, which sibling threads
    share: a second thread on a core only adds waiting. So does a thread that a container's limit
    makes wait, because all threads wait for the last one.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = psutil.cpu_count(logical=False) or 1
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota() -> float | None:
    """CPUs that the container's limit comes to; None for no limit, or none that is known."""
    try:
        quota, period = _LIMIT.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _siblings(cpu: int) -> str:
    """The threads of the core that has this CPU, or the CPU itself where that is not known."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
