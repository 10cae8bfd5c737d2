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
        reason="puts a library of its own in front of glibc, which a C compiler has to make",
    ),
]


@pytest.mark.parametrize("program", ["chat", "story", "batch", "server"])
def test_a_killed_program_loses_nothing(program: str, seed: int) -> None:
    assert f"{program}: 2 kills" in run("kills.py", program, "--kills=2", f"--seed={seed}")


def test_memory_that_runs_out_leaves_a_usable_model() -> None:
    assert run("allocations.py", "--every=2500").count(" allocations: ") == 8


def test_a_damaged_model_is_refused_or_read(seed: int) -> None:
    n_files = 100
    said = run("gguf_headers.py", f"--files={n_files}", f"--seed={seed}")
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) ([a-z. ]+)", said)}
    assert counts["files"] == n_files
    # else the damages are no longer those that were meant
    assert counts["refused by us"] > n_files // 4
    assert counts["loaded"] > n_files // 20


def run(program: str, *arguments: str) -> str:
    """What a program says that finds nothing wrong."""
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
