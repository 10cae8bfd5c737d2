"""`make soak` for some seconds: it fails where an answer is wrong, or where there is none."""

from __future__ import annotations

import subprocess
import sys

from compiled import ROOT


def test_a_server_under_load_answers_rightly() -> None:
    command = [sys.executable, str(ROOT / "tests" / "soak" / "many_clients.py")]
    done = subprocess.run(
        [*command, "--minutes", "0.05", "--clients", "12"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
