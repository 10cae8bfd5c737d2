"""`pyh2o serve` and `pyh2o chat --web` as separate processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from loopback import PATIENCE

# In the checkout, Python would take the source folder for the installed package.
OUTSIDE = Path(__file__).parent


class Program:
    """A serving command as a process, with its output."""

    def __init__(
        self, *arguments: str | Path | int, command: str = "serve", **variables: str
    ) -> None:
        environment = {**os.environ, "PYH2O_THREADS": "1", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pyh2o.cli", command, *map(str, arguments)],
            env=environment,
            cwd=OUTSIDE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.notes = ""

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def address(self) -> str:
        """Return the address, once it listens."""
        while not (found := re.search(r"http://\S+/v1", self.notes)):
            assert self.process.stderr is not None
            line = self.process.stderr.readline()
            assert line, f"it ended: {self.notes}"
            self.notes += line
        return found[0]

    @property
    def port(self) -> int:
        return int(self.address().removesuffix("/v1").rpartition(":")[2])

    def end(self) -> int:
        """Wait for its end. Return the exit code."""
        assert self.process.stderr is not None
        self.notes += self.process.stderr.read()
        return self.process.wait(PATIENCE)

    def stop(self) -> None:
        """Press Ctrl-C and wait for a clean exit."""
        self.process.send_signal(signal.SIGINT)
        assert self.end() == 0
        assert "Traceback" not in self.notes
        assert self.notes.endswith("stopped\n")
