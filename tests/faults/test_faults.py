"""A few of the trials that `make crash` does by the thousand."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).with_name("faults.py")

pytestmark = [
    pytest.mark.randomised,
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc" or shutil.which("cc") is None,
        reason="puts a library of its own in front of glibc, which a C compiler has to make",
    ),
]


@pytest.mark.parametrize("subject", ["chat", "story", "batch", "server"])
def test_nothing_is_lost_by_a_program_in_trouble(subject: str, seed: int) -> None:
    few = ["--kills=5", "--failures=1", f"--seed={seed}"]
    done = subprocess.run(
        [sys.executable, str(FAULTS), subject, *few], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{subject}: 8 trials" in done.stdout
