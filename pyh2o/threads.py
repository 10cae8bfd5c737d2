"""How many threads to compute with."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Cores this process may run on, counting the two threads of one core once.

    Attention and matrix products are bound by memory and vector units, which sibling threads
    share: a second thread on a core only adds waiting.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if cpus is None:
        return max(1, os.cpu_count() or 1)
    siblings = {_sibling_list(cpu) for cpu in cpus}
    return max(1, len(siblings))


def _sibling_list(cpu: int) -> str:
    """The threads of the core that has this CPU, or the CPU itself where that is not known."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)
