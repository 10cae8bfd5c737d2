"""Shared by the tests of the command line: the program in this process and as a separate one."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from pyh2o.cache.settings import Budget, EvictionSettings
from pyh2o.cache.statistics import KVStatistics
from pyh2o.cli import loading
from pyh2o.cli.app import app
from pyh2o.cli.options import ModelOptions
from pyh2o.policies import H2O

if TYPE_CHECKING:
    from pyh2o import Llama


def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and write only in tmp_path, whatever the user has configured."""
    for name in list(os.environ):
        if name.startswith("PYH2O_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYH2O_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))
    monkeypatch.setenv("PYH2O_CONFIG", os.devnull)
    # By default layers would go to a GPU, which rounds differently.
    monkeypatch.setattr("pyh2o.library.backends.discrete_gpus", list)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


EMPTY_CACHE = KVStatistics(
    evicting=True,
    limits=Budget(EvictionSettings(policy=H2O()), window=1000, heavy=100, recent=100, slack=100),
    position=0,
    position_limit=1000,
    cells=512,
    used=0,
    pinned=0,
    compactions=0,
    tokens_evicted=0,
    rows_evicted=0,
    rows_moved=0,
    compaction_seconds=0.25,
    rebases=0,
    rebase_seconds=0.0,
    bytes_k=2**20,
    bytes_v=2**20,
    bytes_scores=2**20,
    bytes_full=2**23,
)


def cache_with(position: int, *, window: int = 1000, **changes: Any) -> KVStatistics:
    """Return the cache of a fake model after `n` tokens."""
    limits = replace(EMPTY_CACHE.limits, window=window)
    return replace(
        EMPTY_CACHE, **{"limits": limits, "position": position, "used": position, **changes}
    )


@dataclass
class LoadedModel:
    """The tiny model that a command loads; the test specifies the sampled tokens.

    An `error` is raised instead of loading it.
    """

    llm: Llama
    options: ModelOptions | None = None
    before_reading: Callable[[], None] = lambda: None
    closed: int = 0
    error: Exception | None = None

    def be_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `chat`, `ask` and `generate` load it."""
        self.byte_0 = self.llm.tokenize(b"\x01", add_bos=False)[-1] - 1
        self.llm.reset()
        monkeypatch.setattr(self.llm, "close", self.close)
        monkeypatch.setattr(loading, "load_llama", self.load)

    def load(self, options: ModelOptions, run: loading.ModelRun, *, store_mib: int) -> Llama:
        self.options = options
        self.llm.text.model.snapshots.mib = store_mib
        if self.error is not None:
            raise self.error
        self.llm.text.prompt_progress = run.on_read
        self.llm.text.while_reading = run.interrupts.check
        return self.llm

    def close(self) -> None:
        self.closed += 1


@dataclass(frozen=True)
class Output:
    """Output and exit code of a run."""

    code: int
    text: str
    notes: str


def run(*arguments: str, stdin: str | bytes | None = None) -> Output:
    """Run the program in this process."""
    result = CliRunner().invoke(app, arguments, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Output(result.exit_code, result.stdout, result.stderr)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


PATIENCE = 900 if "-fsanitize" in os.environ.get("CXXFLAGS", "") else 120
"""Seconds after which a test gives up: far more than is needed even on a busy machine."""

# Greedily sampled, the tiny model repeats a few letters forever.
ENDLESS = ["--temp", "0", "--repeat-penalty", "1"]


def program_environment(*, on_servers: bool = False) -> dict[str, str]:
    """Use one thread, as more only wait for each other, and no GPU, which rounds differently.

    The terminals of the tests do not report their cursor position.
    """
    places = {} if on_servers else {"PYH2O_GPU_LAYERS": "0"}
    return {**os.environ, "PYH2O_THREADS": "1", "PROMPT_TOOLKIT_NO_CPR": "1", **places}


def pyh2o_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pyh2o.cli", *map(str, arguments)]


def run_program(*arguments: str | Path, stdin: str = "") -> Output:
    done = subprocess.run(
        pyh2o_command(*arguments),
        input=stdin.encode(),
        env=program_environment(on_servers="--rpc" in arguments),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    return Output(done.returncode, done.stdout.decode(), done.stderr.decode())


def start_program(
    *arguments: str | Path, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        pyh2o_command(*arguments),
        env=program_environment(on_servers="--rpc" in arguments),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Screen:
    """The program on its own terminal."""

    def __init__(self, *arguments: str | Path, stdout: Path | None = None) -> None:
        """Start it with its standard output on the terminal or in a file."""
        command = pyh2o_command(*arguments)
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            if stdout is not None:
                os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
            os.execve(command[0], command, {**program_environment(), "TERM": "xterm"})
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern appears; drop and return the output up to its end."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, self.shown
            if not self._read():
                raise AssertionError(f"the program ended before {pattern!r}: {self.shown}")
        seen, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return seen

    def end(self) -> int:
        """Read to the end. Return the exit code."""
        while self._read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End the program as a crash would."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def _read(self) -> bool:
        if not select.select([self._terminal], [], [], PATIENCE)[0]:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"nothing more came after {self.shown!r}")
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # Linux reports the end of the program this way
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)
