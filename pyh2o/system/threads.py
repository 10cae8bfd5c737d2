"""Number of threads to compute with."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_TOPOLOGY = Path("/sys/devices/system/cpu")
# A container's own limit; psutil does not know control groups.
_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> int:
    """Return the number of cores that this process may keep busy.

    Attention and matrix products are limited by memory and vector units, which both threads of a
    core share, so a second thread on a core only adds waiting. Threads above a container's limit
    do, too, because all threads wait for the last one.
    """
    if hasattr(os, "sched_getaffinity"):  # psutil counts cores that this process may not use
        cores = len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})
    else:
        cores = psutil.cpu_count(logical=False) or 1
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def cpu_quota() -> float | None:
    """Return the container's limit in CPUs; None if there is none or it is unknown."""
    try:
        quota, period = _LIMIT.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _siblings(cpu: int) -> str:
    """Return the CPUs of the same core, or the CPU itself if they are unknown."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
