"""Choose which allocations fail: the Python side of failing_new.cpp.

An allocation is ours if one of our functions makes it, or llama.cpp or the standard library called
by one; those of ggml do not count. This needs the library with symbols from the build folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_suffix(".cpp")
CHECKOUT = Path(__file__).parents[2]
LIBRARY = "libllama.so"
MOST_CALLS = 100
_PREFIX = "pyh2o-failing-"
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)


class FailingNew:
    """A context manager that lets one of our allocations fail.

    Args:
        fails: returns whether an allocation fails, by its number from 0; called in the allocation.
        kinds: count only the first allocation of each call stack.

    Attributes:
        n: number of counted allocations.
    """

    def __init__(self, fails: Callable[[int], bool], *, kinds: bool) -> None:
        self.n = 0
        self._fails = fails
        self._kinds = kinds
        self._shim = ctypes.CDLL(None)
        self._shim.failing_disarm.restype = ctypes.c_long
        self._ask = _ASK(self._asked)

    def _asked(self, number: int) -> int:
        try:
            return self._fails(number)
        except BaseException:  # ctypes would ignore it
            traceback.print_exc()
            os._exit(1)

    def __enter__(self) -> FailingNew:
        self._shim.failing_arm(self._ask, ctypes.c_int(self._kinds))
        return self

    def __exit__(self, *error: object) -> None:
        self.n = self._shim.failing_disarm()


def preload() -> None:
    """Compile failing_new.cpp, and start this program again with it loaded before all libraries."""
    loaded = os.environ.pop("LD_PRELOAD", "")  # not for programs that this one starts
    if Path(loaded).name.startswith(_PREFIX):
        Path(loaded).unlink()
        return
    # a path in LD_PRELOAD must not have blanks, which other folders may have
    handle, library = tempfile.mkstemp(prefix=_PREFIX, suffix=".so", dir="/tmp")
    os.close(handle)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
    try:
        subprocess.run(["c++", *flags, "-o", library, str(SOURCE), "-ldl"], check=True)
    except BaseException:
        Path(library).unlink()
        raise
    os.execve(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:]],
        {**os.environ, "LD_PRELOAD": library},
    )


def watch_our_functions() -> None:
    """Pass the address ranges of our functions and of ggml to the library."""
    ours = sorted(_our_functions())
    theirs = sorted((begin, end) for _, begin, end in _mapped("libggml"))
    ranges = np.array(ours + theirs, dtype=np.uintp)
    ctypes.CDLL(None).failing_watch(
        ranges.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(len(ours)),
        ctypes.c_long(len(theirs)),
    )


def our_calls() -> str:
    """Return the calling functions of the library, one per line, innermost first."""
    library, begin, end = _with_symbols()
    frames = (ctypes.c_void_p * MOST_CALLS)()
    n = ctypes.CDLL(None).backtrace(frames, MOST_CALLS)
    places = [hex(at - begin - 1) for at in frames[:n] if at is not None and begin <= at < end]
    return _output("addr2line", "-Cfs", "--pretty-print", f"--exe={library}", *places)


def _our_functions() -> Iterator[tuple[int, int]]:
    """Yield begin and end of each of our functions in the loaded library."""
    import llama_cpp  # noqa: F401

    library, base, _ = _with_symbols()
    for line in _output("nm", "--print-size", "--defined-only", str(library)).splitlines():
        match = re.match(r"([0-9a-f]+) ([0-9a-f]+) [tTwWuV] (.*h2o.*)", line)
        if match:
            begin = base + int(match[1], 16)
            yield begin, begin + int(match[2], 16)


def _with_symbols() -> tuple[Path, int, int]:
    """Return the build with symbols of the loaded library, and its address range."""
    [(installed, begin, end)] = _mapped(LIBRARY)
    build = _build_id(installed)
    found = [each for each in CHECKOUT.glob(f"build/*/bin/{LIBRARY}") if _build_id(each) == build]
    if not found:
        sys.exit(f"no build of {installed} with symbols: run `make .venv/tested`")
    return found[0], begin, end


def _mapped(name: str) -> list[tuple[Path, int, int]]:
    """Return mapped files whose names start with `name`, with their address ranges."""
    found: dict[Path, tuple[int, int]] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split()[-1])
        if path.name.startswith(name):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            first, last = found.get(path, (begin, end))
            found[path] = (min(first, begin), max(last, end))
    return [(path, begin, end) for path, (begin, end) in found.items()]


def _build_id(path: Path) -> str:
    found = re.search(r"Build ID: (\w+)", _output("readelf", "-n", str(path)))
    return found[1] if found else str(path)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
