"""A worker of a batch on a Ray cluster: a process with an engine."""

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
from ..sessions.identity import settings_identity
from ..system.threads import physical_cores
from .answering import Answers, RequestDefaults
from .reading import BatchRequest


@dataclass(frozen=True)
class Job:
    """Parameters of every worker.

    Attributes:
        model_path: path of the model file, the same on every machine.
        settings: settings of `Engine`. If `n_threads` is None, all physical cores are used, up to
            `cpus`.
        cpus: CPUs that Ray reserves for a worker.
    """

    model_path: str
    model: dict[str, Any]
    settings: dict[str, Any]
    texts: int
    cpus: int
    defaults: RequestDefaults
    version: str = __version__


class Worker:
    """Ray's actor: it is created once per process and called from one thread per text."""

    def __init__(self, job: Job) -> None:
        """Load the model; if that fails, `answer` raises the error.

        Ray would retry an error here and print a page of its own.
        """
        self._about: dict[str, Any] = {}
        self._failure = ""
        try:
            _check_machine(job)
            self._open(job)
        except (PyH2OError, OSError, MemoryError) as error:
            self._failure = _failure(error)

    def answer(self, request: BatchRequest | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Answer a request; None is a greeting, which only waits until the worker is ready.

        Returns:
            Information about the worker ("machine", "settings" and "cache_bytes" of a cache), and
            the line of the output; None for a greeting.
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
    """Raise a PyH2OError if this machine's pyh2o, model file or GPU does not fit the job."""
    if job.version != __version__:
        raise BatchError(
            f"the machine has pyh2o {__version__}, the batch was started with {job.version}: "
            "install the same version on all machines"
        )
    path = Path(job.model_path)
    if not path.is_file():
        raise BatchError(
            f"the model file {path} does not exist: copy it to that path on all machines"
        )
    identity = identify(job.model_path).record()
    if any(identity[name] != job.model[name] for name in ("bytes", "sha256")):
        raise BatchError(
            f"{path} differs from the model where the batch was started: copy the same file to all "
            "machines"
        )
    if job.settings["n_gpu_layers"] and (missing := why_no_gpu()):
        raise SettingsError(missing)


def _failure(error: Exception) -> str:
    line = str(error) or "out of memory: use a smaller --ctx, fewer --texts, or --kv-type q8_0"
    return f"worker {os.getpid()} on {socket.gethostname()}: {line}"
