"""A few of the trials of `make crash`."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.randomised,
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc" or shutil.which("cc") is None,
        reason="preloads a library, which needs glibc and a C compiler",
    ),
]


@pytest.mark.parametrize("program", ["chat", "story", "batch", "server"])
def test_a_killed_program_loses_nothing(program: str, seed: int) -> None:
    assert f"{program}: 2 kills" in run("kills.py", program, "--kills=2", f"--seed={seed}")


def test_a_failed_allocation_leaves_a_usable_model() -> None:
    assert run("allocations.py", "--every=2500").count(" allocations: ") == 8


def test_a_damaged_model_is_refused_or_read(seed: int) -> None:
    n_files = 100
    report = run("gguf_headers.py", f"--files={n_files}", f"--seed={seed}")
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) ([a-z. ]+)", report)}
    assert counts["files"] == n_files
    # otherwise the mutations no longer reach the code
    assert counts["refused by us"] > n_files // 4
    assert counts["loaded"] > n_files // 20


def run(program: str, *arguments: str) -> str:
    """Return the output of a program that finds nothing."""
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
