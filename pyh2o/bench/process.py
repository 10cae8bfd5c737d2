"""The process of one cache: it evaluates what it is told, and says how long that took.

Each cache has one of its own, because peak memory belongs to a process.
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

# The process finds pyh2o where this one has found it.
_PROGRAM = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from pyh2o.bench.process import serve
serve(connection)
"""
# Seconds that a process has to end by itself.
_PATIENCE = 5
# Tokens that are evaluated before the first measurement, as a prompt and one at a time.
_WARM_UP = (8, 2)


@dataclass(frozen=True)
class Cache:
    """One cache under test.

    Attributes:
        name: in tables; no other cache of a comparison has it.
        settings: the arguments of what opens the model.
        opener: what does so with the model's path, as module:function.
        is_full: whether it is one of llama.cpp's full caches, which the others are compared with.
        text: most tokens that it reads; it is then measured at the longest history only.
        at_once: whether it reads a text only as a whole, and into an empty cache.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    opener: str = "pyh2o.bench.process:LlamaModel"
    is_full: bool = False
    text: int | None = None
    at_once: bool = False


@dataclass(frozen=True)
class Use:
    """What a cache takes: bytes of K, V and scores of the layers that see the whole text, and more.

    Attributes:
        bytes_kv: of these layers; `bytes_fixed` of windows and recurrent states, `bytes_archive` of
            the archive, `bytes_device` all that is on GPUs.
        cells: allocated.
        used: rows that a token attends to: those in cells, and those found in the archive.
        compactions, compaction_seconds: so far.
        found_share: share of attention that found rows got; None without an archive.
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
class Done:
    """What was evaluated: seconds that it took, tokens of text there are now, and memory.

    Attributes:
        peak_bytes: most memory of the process in RAM so far.
    """

    seconds: float
    position: int
    use: Use
    peak_bytes: int


class CacheFailedError(Exception):
    """Why a cache cannot be measured any more, in one line."""


# "read" so many tokens of the text as a prompt, "end" it with so many, "generate" as if so many
# were drawn, or "reset": forget the text.
Action = Literal["read", "end", "generate", "reset"]


class Worker:
    """The process as the one that measures sees it.

    Attributes:
        ready: what it said when the model was open and warm.
        pid: of the process.
    """

    def __init__(self, cache: Cache, model: Path, tokens: Sequence[int]) -> None:
        """Start the process and wait for it.

        Raises:
            CacheFailedError: the model or the cache is refused, or the process died.
        """
        # What llama.cpp says when it aborts goes to stderr.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `close`
        self._connection, child = Pipe()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(child.fileno())],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Ctrl-C is for the process that measures, which then ends this one.
                start_new_session=True,
            )
        self.pid = self._process.pid
        try:
            self.ready = self._asked(sys.path, (cache, model, tokens))
        except BaseException:
            self.close()
            raise

    def ask(self, action: Action, n: int = 0) -> Done:
        """Let it do something, and wait.

        Raises:
            CacheFailedError: it failed or died.
        """
        return self._asked((action, n))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._log.close()

    def _asked(self, *messages: Any) -> Done:
        try:
            for message in messages:
                self._connection.send(message)
            reply: Done | str = self._connection.recv()
        except (EOFError, OSError):
            raise CacheFailedError(self._death()) from None
        if isinstance(reply, str):
            raise CacheFailedError(reply)
        return reply

    def _death(self) -> str:
        """The signal or exit code, and the last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        code = self._process.returncode
        reason = f"its process ended with exit code {code}"
        if code is not None and code < 0:
            hint = " (too little memory?)" if code == -9 else ""
            reason = f"its process was ended by signal {-code}{hint}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        said = [" ".join(line.split()) for line in lines if line.strip()]
        return f"{reason}: {said[-1]}" if said else reason


class LlamaModel:
    """llama.cpp, with its full cache or this runtime's; other programs have the same methods."""

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
        """Tokens of text so far."""
        return int(self._llm.n_tokens)

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        """Evaluate tokens of a prompt; `last` says that generation comes next."""
        self._llm.eval(tokens)
        self._wait(self._llm.ctx)

    def generate(self, token: int) -> None:
        """Evaluate one token."""
        self.read([token], last=True)

    def reset(self) -> None:
        """Forget the text."""
        self._llm.reset()

    def use(self) -> Use:
        """What the cache takes now."""
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


def serve(connection: Connection) -> None:
    """Do what the process at the other end says, until it hangs up or something goes wrong."""
    try:
        cache, path, tokens = connection.recv()
        module, _, name = cache.opener.partition(":")
        model: LlamaModel = getattr(import_module(module), name)(str(path), **cache.settings)
        n_prompt, n_single = _WARM_UP
        model.read(tokens[:n_prompt], last=True)
        for token in tokens[:n_single]:
            model.generate(token)
        model.reset()
        connection.send(_done(model, 0.0))
        while True:
            connection.send(_done(model, _timed(model, tokens, *connection.recv())))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            connection.send(" ".join(str(error).split()) or type(error).__name__)


def _timed(model: LlamaModel, tokens: Sequence[int], action: Action, n: int) -> float:
    """Carry out one command; seconds that it took."""
    part = tokens[model.position : model.position + n]
    started = time.perf_counter()
    if action == "generate":
        for token in part:
            model.generate(token)
    elif action == "reset":
        model.reset()
    else:
        model.read(part, last=action == "end")
    return time.perf_counter() - started


def _done(model: LlamaModel, seconds: float) -> Done:
    return Done(seconds, model.position, model.use(), _peak_bytes())


def _peak_bytes() -> int:
    """Return the peak memory of this process."""
    if (status := Path("/proc/self/status")).exists():  # on Linux ru_maxrss includes the parent's
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    if sys.platform == "win32":  # where psutil knows the peak
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
