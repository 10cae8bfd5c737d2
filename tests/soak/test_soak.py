"""`make soak` for some seconds."""

from __future__ import annotations

import subprocess
import sys

from compiled import ROOT


def test_answers_of_a_loaded_server_are_right() -> None:
    command = [sys.executable, str(ROOT / "tests" / "soak" / "many_clients.py")]
    done = subprocess.run(
        [*command, "--minutes", "0.05", "--clients", "12"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
