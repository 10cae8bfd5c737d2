"""A worker of a batch on a Ray cluster: an engine in a process of its own, on some machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine import Engine
from ..errors import BatchError, PyH2OError, SettingsError
from ..library import __version__
from ..library.devices import why_no_gpu
from ..models.file_identity import identify
from ..sessions.headers import settings_identity
from ..system.threads import physical_cores
from .answering import Answers, RequestDefaults
from .reading import BatchRequest


@dataclass(frozen=True)
class Job:
    """What every worker is told.

    Attributes:
        model_path: of the model file, on every machine.
        model: the fields of its `ModelIdentity`, which is the same everywhere.
        settings: for `Engine`. Threads of None are all physical cores that it may have.
        texts: requests that a worker answers at once.
        cpus: that Ray gives to a worker.
        defaults: for what the requests leave open.
        version: of pyh2o.
    """

    model_path: str
    model: dict[str, Any]
    settings: dict[str, Any]
    texts: int
    cpus: int
    defaults: RequestDefaults
    version: str = __version__


class Worker:
    """Made by Ray once in each process, and asked in as many threads as there are texts."""

    def __init__(self, job: Job) -> None:
        """Load the model; why that fails is what every call returns then.

        An error here would reach the user as a page of Ray's, after it has tried again.
        """
        self._about: dict[str, Any] = {}
        self._failure = ""
        try:
            _check_machine(job)
            self._open(job)
        except (PyH2OError, OSError, MemoryError) as error:
            self._failure = _failure(error)

    def answer(self, request: BatchRequest | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Answer a request, or None, which is a greeting.

        Returns:
            What the worker is like ("machine", "settings" of its caches, "cache_bytes" of one), and
            the line of the output; None for a greeting.

        Raises:
            BatchError: why there is no line.
        """
        if self._failure:
            raise BatchError(self._failure)
        try:
            return self._about, None if request is None else self._answers.answer(request)
        except MemoryError as error:
            raise BatchError(_failure(error)) from None

    def _open(self, job: Job) -> None:
        settings = dict(job.settings)
        threads = settings["n_threads"] or max(1, min(job.cpus, physical_cores()))
        settings["n_threads"] = threads
        settings["n_threads_batch"] = settings["n_threads_batch"] or threads
        engine = self._engine = Engine(job.model_path, texts=job.texts, store_mib=0, **settings)
        self._answers = Answers(engine, job.defaults, lambda: None)
        self._about = {
            "machine": socket.gethostname(),
            "settings": settings_identity(engine.model),
            "cache_bytes": engine.report()[0].kv.bytes_total,
        }


def _check_machine(job: Job) -> None:
    """Refuse a machine that would give other answers.

    Raises:
        PyH2OError: it has another pyh2o or another model file, or no GPU where one is asked for.
    """
    if job.version != __version__:
        raise BatchError(
            f"it has pyh2o {__version__}, and the batch is of {job.version}: install the same "
            "version on all machines"
        )
    path = Path(job.model_path)
    if not path.is_file():
        raise BatchError(f"there is no model file {path}: put it there on all machines")
    identity = identify(job.model_path).record()
    if any(identity[name] != job.model[name] for name in ("bytes", "sha256")):
        raise BatchError(
            f"{path} is another model than where the batch was started: put the same file there "
            "on all machines"
        )
    if job.settings["n_gpu_layers"] and (missing := why_no_gpu()):
        raise SettingsError(missing)


def _failure(error: Exception) -> str:
    line = str(error) or "out of memory: use a smaller --ctx, fewer --texts, or --kv-type q8_0"
    return f"worker {os.getpid()} on {socket.gethostname()}: {line}"
