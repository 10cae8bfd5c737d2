"""Whether llama.cpp's library can be loaded, found out where it does no harm."""

from __future__ import annotations

import signal
import subprocess
import sys

from ..errors import PyH2OError

PATIENCE = 120
"""Seconds that loading may take, and looking for GPUs."""

_CURE = "install pyh2o again, on this machine"


def why_not_loaded() -> str | None:
    """Why llama.cpp's library cannot be loaded, and what to do about it; None where it can.

    A library that was built for another processor, or the driver of a GPU, may end the program. So
    another process tries it first, unless it is loaded here already.
    """
    if "pyh2o._native._ffi" not in sys.modules and (ended := _how_it_ends()):
        return f"llama.cpp's library ends the program that loads it ({ended}): {_CURE}"
    try:
        find_devices()
    except PyH2OError as error:
        return str(error)
    except (ImportError, OSError, RuntimeError) as error:
        return f"llama_cpp cannot be loaded ({error}): {_CURE}"
    return None


def find_devices() -> None:
    """Load the library, and let it look for GPUs."""
    from .backends import local_devices

    local_devices()


def _how_it_ends() -> str | None:
    """Which signal ends a process that loads the library, or that it hangs; None for neither."""
    find = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import find_devices"
    command = [sys.executable, "-c", f"{find}; find_devices()"]
    try:
        code = subprocess.run(
            command, capture_output=True, timeout=PATIENCE, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"it takes more than {PATIENCE} seconds"
    return signal.Signals(-code).name if code < 0 else None
