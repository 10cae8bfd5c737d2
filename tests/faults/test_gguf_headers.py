"""A few of the damaged models that `make crash` loads by the thousand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("gguf_headers.py")
N_FILES = 100


@pytest.mark.randomised
@pytest.mark.skipif(sys.platform == "darwin", reason="limits of memory are Linux's")
def test_damaged_model_is_refused_or_read(seed: int) -> None:
    command = [sys.executable, str(PROGRAM), f"--files={N_FILES}", f"--seed={seed}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) ([a-z. ]+)", done.stdout)}
    assert counts["files"] == N_FILES
    # else the damages are no longer those that were meant
    assert counts["refused by us"] > N_FILES // 4
    assert counts["loaded"] > N_FILES // 20
