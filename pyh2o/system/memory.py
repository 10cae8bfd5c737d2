"""The memory of a process."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

_PROCESSES = Path("/proc")
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
    if _has_glibc() and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Let the system have what was freed, as far as it is whole pages.

    By itself glibc gives back the end of its memory alone. What was freed between pieces that are
    still used waits there for others that fit, and in a server, whose requests are of all lengths,
    there is more of it from hour to hour. Elsewhere than with glibc this does nothing.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in os.confstr_names


def resident_bytes() -> int:
    """Memory of this process that is in RAM: now on Linux, elsewhere the most it ever was."""
    statm = _PROCESSES / "self" / "statm"
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def status_bytes(name: str, process: int | str = "self") -> int | None:
    """What a line such as "VmHWM:  1234 kB" says of a process; None where the system does not.

    Args:
        name: of the line, as Linux has it: "RssAnon" is what is no mapped file, "RssFile" what is
            one, "VmHWM" the most that was in RAM.
        process: its number; this one by default.
    """
    status = _PROCESSES / str(process) / "status"
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
