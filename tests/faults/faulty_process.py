"""Runs `pyh2o` in forks of one process, whose files fail, or whose clocks jump, where a trial says.

Starting Python and loading the libraries takes a hundred times as long as what a tiny model does,
so it is done once. The process has to run with `faulty_files.c` and `jumping_clock.c` in front of
its libraries.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from power_cut import leave_what_a_disk_has

PREFIX = "pyh2o-faulty-"
STRICT = ["-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
COMPILE = {".c": ["cc", "-std=gnu11", *STRICT], ".cpp": ["c++", "-std=c++17", *STRICT]}
PATIENCE = 120
# That a program sleeps, by the clock that does not jump.
NIGHT_SECONDS = (0.1, 2.0)


class Fault(IntEnum):
    """As in faulty_files.c; the last two are of the clocks."""

    NONE = 0
    KILL = 1
    EIO = 2
    FULL = 3
    SHORT = 4
    POWER = 5  # killed, and what was not flushed may be gone
    CLOCK = 6  # they jump all the time
    SLEEP = 7  # the program stops for a while, and hours have passed


@dataclass(frozen=True)
class Trouble:
    """What happens to a program.

    Attributes:
        fault: what.
        at: number of the operation on a file, from 0, that it begins with; milliseconds from its
            beginning until it sleeps.
        seed: of what is drawn then, such as how much of a write is done.
    """

    fault: Fault = Fault.NONE
    at: int = 0
    seed: int = 0


NO_TROUBLE = Trouble()


@dataclass(frozen=True)
class Ended:
    """A program that has ended.

    Attributes:
        code: its exit code; minus the signal that ended it.
        out, notes: what it wrote to standard output and standard error.
        n_operations: that it did to its files, if it was not killed.
        n_jumps: of its clocks, likewise.
    """

    code: int
    out: str
    notes: str
    n_operations: int = 0
    n_jumps: int = 0

    @property
    def killed(self) -> bool:
        """Whether the trial killed it."""
        return self.code == -signal.SIGKILL


def in_front_of_libraries(*sources: Path) -> None:
    """Have libraries in front of all others: compile them, and run this program again with them."""
    loaded = os.environ.pop("LD_PRELOAD", "")  # of this process, and not of those that it starts
    if Path(loaded.partition(":")[0]).name.startswith(PREFIX):
        for library in loaded.split(":"):
            Path(library).unlink()
        return
    libraries = []
    try:
        for source in sources:
            # a path of LD_PRELOAD has no blanks, which other folders may have
            handle, library = tempfile.mkstemp(prefix=PREFIX, suffix=".so", dir="/tmp")
            os.close(handle)
            libraries.append(library)
            command = [*COMPILE[source.suffix], "-o", library, str(source), "-ldl"]
            subprocess.run(command, check=True)
    except BaseException:
        for library in libraries:
            Path(library).unlink()
        raise
    os.execve(
        sys.executable,
        [sys.executable, *sys.orig_argv[1:]],
        {**os.environ, "LD_PRELOAD": ":".join(libraries)},
    )


class Program:
    """A command of `pyh2o` in a fork.

    Args:
        folder: whose files fail; also the working folder. Empty, where the power fails.
        arguments: of the command.
        trouble: what happens to them.
        typed: standard input.
    """

    def __init__(
        self, folder: Path, arguments: Sequence[str], trouble: Trouble, typed: str = ""
    ) -> None:
        self._trouble = trouble
        self._said = folder.with_name(folder.name + ".said")
        shutil.rmtree(self._said, ignore_errors=True)
        self._said.mkdir()
        (self._said / "in").write_text(typed)
        self.folder = folder
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(arguments)
            finally:
                os._exit(70)  # whatever went wrong: nothing of the parent is run here
        self._night = Night(self, trouble) if trouble.fault is Fault.SLEEP else None

    def _run(self, arguments: Sequence[str]) -> None:
        trouble = self._trouble
        for number, name in enumerate(("in", "out", "notes")):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(self._said / name, flags, 0o600), number)
        faulthandler.enable()  # a program that hangs tells where
        # as in a terminal, also where the tests run in the background and ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(self.folder)
        os.environ["PYH2O_CHATS"] = str(self.folder)
        from pyh2o.cli.app import app

        files = ctypes.CDLL(None)
        if trouble.fault is Fault.POWER:
            files.faulty_log(os.fsencode(self._said / "disk"))
        files.faulty_arm(
            os.fsencode(self.folder.resolve()),
            ctypes.c_int(trouble.fault),
            ctypes.c_long(trouble.at),
            ctypes.c_ulonglong(trouble.seed),
        )
        if trouble.fault in (Fault.CLOCK, Fault.SLEEP):
            files.clock_arm(trouble.fault is Fault.CLOCK, ctypes.c_ulonglong(trouble.seed))
        code = 0
        try:
            app(list(arguments), prog_name="pyh2o")
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        sys.stderr.flush()
        files.faulty_count.restype = files.clock_jumps.restype = ctypes.c_long
        (self._said / "counts").write_text(f"{files.faulty_count()} {files.clock_jumps()}")
        os._exit(code)

    def notes(self) -> str:
        """What it has written to standard error so far."""
        return _text(self._said / "notes")

    def is_running(self) -> bool:
        """Whether it has not ended yet; it can be waited for all the same."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def wait(self) -> Ended:
        """Wait for its end; a program that hangs is killed.

        Raises:
            AssertionError: it hung.
        """
        deadline = time.monotonic() + PATIENCE
        while self.is_running():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGABRT)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"it hung, and said: {self.notes()}")
            time.sleep(0.002)
        if self._night is not None:
            self._night.wait()
        _, status = os.waitpid(self.pid, 0)
        counts = [int(count) for count in _text(self._said / "counts").split()]
        code = os.waitstatus_to_exitcode(status)
        if self._trouble.fault is Fault.POWER:
            leave_what_a_disk_has(self.folder, self._said / "disk", self._trouble.seed)
        return Ended(code, _text(self._said / "out"), self.notes(), *counts)


class Night:
    """Has a program sleep, from a process of its own; meanwhile its locks must hold.

    Args:
        program: that runs.
        trouble: when it sleeps, and for how long.
    """

    def __init__(self, program: Program, trouble: Trouble) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            code = 70
            try:
                time.sleep(trouble.at / 1000)
                os.kill(program.pid, signal.SIGSTOP)
                time.sleep(random.Random(trouble.seed).uniform(*NIGHT_SECONDS))
                code = any(_is_free(lock) for lock in program.folder.glob(".*.lock"))
                os.kill(program.pid, signal.SIGCONT)
            finally:
                os._exit(code)

    def wait(self) -> None:
        """Wait until it is over.

        Raises:
            AssertionError: a session could have been opened by somebody else.
        """
        _, status = os.waitpid(self._pid, 0)
        assert status == 0, f"a lock was free while the program slept ({status})"


def _is_free(lock: Path) -> bool:
    with suppress(FileNotFoundError), lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return lock.exists()
    return False


def run(
    folder: Path, arguments: Sequence[str], trouble: Trouble = NO_TROUBLE, typed: str = ""
) -> Ended:
    """A command of `pyh2o` from its beginning to its end."""
    return Program(folder, arguments, trouble, typed).wait()


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
