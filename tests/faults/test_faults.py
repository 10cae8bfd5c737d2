"""A few of the trials that `make crash` does by the thousand."""

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


@pytest.mark.parametrize("subject", ["chat", "story", "batch", "server"])
def test_nothing_is_lost_by_a_program_in_trouble(subject: str, seed: int) -> None:
    few = ["--kills=2", "--cuts=2", "--failures=1", "--clocks=1", f"--seed={seed}"]
    assert f"{subject}: 9 trials" in run("faults.py", subject, *few)


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
