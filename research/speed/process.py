"""A worker as the measuring process sees it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from .messages import Command, Done, Failed, Ready, Start

# The worker finds pyh2o where this process has found it.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from research.speed.worker import serve
serve(connection)
"""

# Seconds that a worker has to end by itself.
_PATIENCE = 5


class CacheFailedError(Exception):
    """A cache that cannot be measured any more, and why, in one line."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class WorkerProcess:
    """The process of one cache, until it is closed.

    Attributes:
        ready: what the worker said when its model was open.
        pid: of the process.
    """

    def __init__(self, start: Start) -> None:
        """Start the process and wait until its model is open and warm.

        Raises:
            CacheFailedError: the model or the cache is refused, or the process died.
        """
        self._name = start.cache.name
        # What llama.cpp says when it aborts goes to stderr.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        self._connection, child = Pipe()
        try:
            self._process = _spawn(child, self._log)
        except BaseException:
            self._connection.close()
            self._log.close()
            raise
        finally:
            child.close()
        self.pid = self._process.pid
        try:
            self._send(sys.path)
            self._send(start)
            self.ready: Ready = self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, command: Command) -> Done:
        """Let the worker do something, and wait for it.

        Raises:
            CacheFailedError: it raised or died.
        """
        self._send(command)
        done: Done = self._receive()
        return done

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._connection.close()
        if self._process.poll() is None:
            # Nothing of it is needed any more, and it may be in the middle of a long evaluation.
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._log.close()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._death() from None

    def _receive(self) -> Any:
        try:
            reply = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(reply, Failed):
            raise CacheFailedError(self._name, reply.reason)
        return reply

    def _death(self) -> CacheFailedError:
        """Why there is no answer: the signal or exit code, and the last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        code = self._process.returncode
        if code is None:
            reason = "its process does not answer"
        elif code < 0:
            reason = f"its process was ended by signal {-code}"
            if code == -9:
                reason += " (too little memory?)"
        else:
            reason = f"its process ended with exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        words = [" ".join(line.split()) for line in lines if line.strip()]
        return CacheFailedError(self._name, f"{reason}: {words[-1]}" if words else reason)


def _spawn(connection: Connection, log: Any) -> subprocess.Popen[bytes]:
    number = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(number)],
        pass_fds=[number],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Ctrl-C is for the measuring process, which then ends its workers.
        start_new_session=True,
    )
