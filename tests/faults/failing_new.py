"""Says which allocations fail: the Python side of failing_new.cpp.

Which of them are ours is known from the call stack: the function is one of ours, or one of
llama.cpp's or the standard library's that ours has called; ggml's own are not looked at.
So it needs the library with its symbols, which is in the build folder.
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
    """Asks about each of our allocations whether it fails, until one of them does.

    Args:
        fails: is asked, in the middle of the allocation; gets its number, from 0.
        kinds: only the first one of each call stack counts.

    Attributes:
        n: allocations that were counted.
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
        except BaseException:  # nobody would notice
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
    """Tell the library whose allocations are ours; what ggml allocates for us is its own."""
    ours = sorted(_our_functions())
    theirs = sorted((begin, end) for _, begin, end in _mapped("libggml"))
    ranges = np.array(ours + theirs, dtype=np.uintp)
    ctypes.CDLL(None).failing_watch(
        ranges.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(len(ours)),
        ctypes.c_long(len(theirs)),
    )


def our_calls() -> str:
    """The functions of the library that this is called from, a line each, the innermost first."""
    library, begin, end = _with_symbols()
    frames = (ctypes.c_void_p * MOST_CALLS)()
    n = ctypes.CDLL(None).backtrace(frames, MOST_CALLS)
    places = [hex(at - begin - 1) for at in frames[:n] if at is not None and begin <= at < end]
    return _output("addr2line", "-Cfs", "--pretty-print", f"--exe={library}", *places)


def _our_functions() -> Iterator[tuple[int, int]]:
    """Begin and end of each of our functions in the library that is loaded."""
    import llama_cpp  # noqa: F401

    library, base, _ = _with_symbols()
    for line in _output("nm", "--print-size", "--defined-only", str(library)).splitlines():
        match = re.match(r"([0-9a-f]+) ([0-9a-f]+) [tTwWuV] (.*h2o.*)", line)
        if match:
            begin = base + int(match[1], 16)
            yield begin, begin + int(match[2], 16)


def _with_symbols() -> tuple[Path, int, int]:
    """The build of the library that is loaded, and begin and end of where that is in memory."""
    [(installed, begin, end)] = _mapped(LIBRARY)
    build = _build_id(installed)
    found = [each for each in CHECKOUT.glob(f"build/*/bin/{LIBRARY}") if _build_id(each) == build]
    if not found:
        sys.exit(f"no build of {installed} with symbols: run `make .venv/tested`")
    return found[0], begin, end


def _mapped(name: str) -> list[tuple[Path, int, int]]:
    """Files of this name that are in memory: each with the begin and the end of where it is."""
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
