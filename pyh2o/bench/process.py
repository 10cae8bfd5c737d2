"""Child processes for measurements, each with an object whose methods the parent calls.

Each cache has its own process, because peak memory is measured per process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psutil

# The child imports pyh2o from the same path as this process.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from pyh2o.bench.process import serve
serve(connection)
"""
# Seconds to wait for a process to exit.
_PATIENCE = 5
# Seconds before each call: OpenMP threads of another process spin for some milliseconds.
PAUSE = 0.01
# Warm-up tokens: as a prompt, and one at a time.
_WARM_UP = (8, 2)


@dataclass(frozen=True)
class Cache:
    """One cache under test.

    Attributes:
        settings: arguments of the opener.
        opener: function that opens the model's path, as module:function.
        is_full: whether it is one of llama.cpp's full caches, the baseline.
        text: maximum tokens that it reads; it is then measured at the longest history only.
        at_once: whether it reads a text only as a whole, into an empty cache.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    opener: str = "pyh2o.bench.process:LlamaModel"
    is_full: bool = False
    text: int | None = None
    at_once: bool = False


@dataclass(frozen=True)
class Use:
    """Memory and work of a cache.

    Attributes:
        bytes_kv: K, V and scores of the layers that see the whole text.
        used: rows that a token attends to: in cells, and retrieved from the archive.
        bytes_fixed: windows and recurrent states.
        bytes_archive, bytes_device: of the archive; all that is on GPUs.
        found_share: share of attention that retrieved rows got; None without an archive.
    """

    bytes_kv: int
    cells: int
    used: int
    bytes_fixed: int = 0
    bytes_archive: int = 0
    bytes_device: int = 0
    compactions: int = 0
    compaction_seconds: float = 0.0
    found_share: float | None = None


@dataclass(frozen=True)
class Measurement:
    """Result of an action: tokens of text after it, and peak resident memory so far."""

    seconds: float
    position: int
    use: Use
    peak_bytes: int


class CacheFailedError(Exception):
    """A child process has failed; the text is one line."""


# "read" `n` tokens of the text as a prompt, "end" the prompt with `n`, "generate" `n` as if they
# were sampled, or "reset": drop the text.
Action = Literal["read", "end", "generate", "reset"]


class Child:
    """An object in a child process."""

    def __init__(self, opener: str, *arguments: Any) -> None:
        """Start the process and make the object with the function or class "module:name"."""
        # llama.cpp prints the reason of an abort to stderr.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        self._connection, child = Pipe()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(child.fileno())],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Ctrl-C goes to the parent only, which then ends the child.
                start_new_session=True,
            )
        self.pid = self._process.pid
        try:
            self._receive(sys.path, (opener, arguments))
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        time.sleep(PAUSE)
        return self._receive((method, arguments))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._log.close()

    def _receive(self, *messages: Any) -> Any:
        try:
            for message in messages:
                self._connection.send(message)
            error, result = self._connection.recv()
        except (EOFError, OSError):
            raise CacheFailedError(self._death()) from None
        if error is not None:
            raise CacheFailedError(error)
        return result

    def _death(self) -> str:
        """Return the signal or exit code, and the last line of output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        code = self._process.returncode
        reason = f"its process ended with exit code {code}"
        if code is not None and code < 0:
            hint = " (out of memory?)" if code == -9 else ""
            reason = f"its process was ended by signal {-code}{hint}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        output = [" ".join(line.split()) for line in lines if line.strip()]
        return f"{reason}: {output[-1]}" if output else reason


class Worker(Child):
    """A cache in a child process, after its warm-up."""

    def __init__(self, cache: Cache, model: Path, tokens: Sequence[int]) -> None:
        super().__init__("pyh2o.bench.process:Reader", cache, model, tokens)
        self.ready: Measurement = self.call("do", "reset", 0)

    def ask(self, action: Action, n: int = 0) -> Measurement:
        done: Measurement = self.call("do", action, n)
        return done


class LlamaModel:
    """llama.cpp with its full cache or this runtime's.

    Objects of other programs have the same methods.
    """

    def __init__(self, path: str, **settings: Any) -> None:
        import llama_cpp

        from ..cache.native import device_bytes
        from ..compat.llama import Llama

        self._device_bytes = device_bytes
        self._llm = Llama(path, **settings)
        # A GPU may still be computing when an evaluation returns.
        self._wait: Any = llama_cpp.llama_synchronize

    @property
    def position(self) -> int:
        return int(self._llm.n_tokens)

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        """Evaluate tokens of a prompt; after the `last` ones, tokens are generated."""
        self._llm.eval(tokens)
        self._wait(self._llm.ctx)

    def generate(self, token: int) -> None:
        self.read([token], last=True)

    def reset(self) -> None:
        self._llm.reset()

    def use(self) -> Use:
        kv = self._llm.kv
        return Use(
            bytes_kv=kv.bytes_k + kv.bytes_v + kv.bytes_scores,
            cells=kv.cells,
            used=kv.used + min(kv.limits.recall, kv.archived),
            bytes_fixed=kv.bytes_fixed,
            bytes_archive=kv.bytes_archive,
            bytes_device=self._device_bytes(self._llm.text.model.address),
            compactions=kv.compactions,
            compaction_seconds=kv.compaction_seconds,
            found_share=kv.found_share if self._llm.text.model.recalls else None,
        )


class Reader:
    """A cache and its text, in the child process."""

    def __init__(self, cache: Cache, path: Path, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._model: LlamaModel = _opener(cache.opener)(str(path), **cache.settings)
        n_prompt, n_single = _WARM_UP
        self._model.read(tokens[:n_prompt], last=True)
        for token in tokens[:n_single]:
            self._model.generate(token)

    def do(self, action: Action, n: int) -> Measurement:
        model = self._model
        part = self._tokens[model.position : model.position + n]
        started = time.perf_counter()
        if action == "generate":
            for token in part:
                model.generate(token)
        elif action == "reset":
            model.reset()
        else:
            model.read(part, last=action == "end")
        seconds = time.perf_counter() - started
        return Measurement(seconds, model.position, model.use(), _peak_bytes())


def serve(connection: Connection) -> None:
    """Run calls from the parent until it disconnects or a call fails."""
    try:
        opener, arguments = connection.recv()
        served = _opener(opener)(*arguments)
        connection.send((None, None))
        while True:
            method, arguments = connection.recv()
            connection.send((None, getattr(served, method)(*arguments)))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            connection.send((" ".join(str(error).split()) or type(error).__name__, None))


def _opener(name: str) -> Any:
    module, _, name = name.partition(":")
    return getattr(import_module(module), name)


def _peak_bytes() -> int:
    if (status := Path("/proc/self/status")).exists():  # on Linux ru_maxrss includes the parent's
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    if sys.platform == "win32":  # where psutil knows the peak
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
