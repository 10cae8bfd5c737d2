"""The CUDA backend loads without a driver."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

from compiled import NATIVE

# The result if there is no driver.
NO_DEVICE = 100

BACKEND = "int cuMemCreate(void);\nint create(void) { return cuMemCreate(); }\n"
DRIVER = "int cuMemCreate(void) { return 7; }\n"


@pytest.mark.skipif(sys.platform == "darwin", reason="no loader with filters, and no CUDA")
@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_driver_functions_are_used_if_there_is_a_driver(tmp_path: Path) -> None:
    for name, source in (("backend.c", BACKEND), ("driver.c", DRIVER)):
        (tmp_path / name).write_text(source)
    here = [tmp_path / "backend.c", NATIVE / "src" / "cuda" / "h2o-cuda-driver.c"]
    link(tmp_path / "backend.so", *here, "-Wl,--auxiliary=libcuda.so.1", f"-Wl,-rpath,{tmp_path}")
    assert created(tmp_path / "backend.so") == NO_DEVICE
    link(tmp_path / "libcuda.so.1", tmp_path / "driver.c")
    assert created(tmp_path / "backend.so") == 7


def link(library: Path, *arguments: Path | str) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, *arguments], check=True)


def created(library: Path) -> int:
    """Return the result of the backend's driver call, from a separate process."""
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).create())"
    return int(subprocess.check_output([sys.executable, "-c", code]))
