"""Runs a batch on a Ray cluster, whose workers have an engine each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..cache.statistics import mib_text
from ..errors import BatchError, MissingPackageError, ServerError, SettingsError
from ..server.refusals import one_line
from .local import TICK, Result
from .ray_worker import Job, Worker
from .reading import BatchRequest

# Restarts of a worker that died, and retries of its request: without a limit, a request that kills
# workers would never end.
RETRIES = 2


@dataclass(frozen=True)
class Machine:
    """A machine in the cluster: CPUs by Ray's count, usually threads, and whole GPUs."""

    cpus: int
    gpus: int = 0


@dataclass(frozen=True)
class Share:
    workers: int
    cpus: int
    gpus: int = 0


@contextmanager
def cluster(*, verbose: bool) -> Iterator[list[Machine]]:
    """Join the Ray cluster at RAY_ADDRESS, or start one here; return its machines."""
    if find_spec("ray") is None:
        raise MissingPackageError("--ray", "ray", "ray")
    ray = import_module("ray")
    level = logging.INFO if verbose else logging.CRITICAL
    try:
        ray.init(include_dashboard=False, log_to_driver=verbose, logging_level=level)
        alive = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    except Exception as error:
        raise ServerError(
            f"cannot use a Ray cluster ({_reason(error)}): set RAY_ADDRESS to a running one, or "
            "unset it"
        ) from None
    try:
        yield [Machine(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in alive]
    finally:
        ray.shutdown()


def share_out(
    machines: Sequence[Machine],
    *,
    workers: int | None = None,
    threads: int | None = None,
    on_gpu: bool = False,
) -> Share:
    """Choose the number of workers and their resources.

    One engine with a whole machine is faster than several that share it, and takes the memory of
    one. So the default is a worker per machine, or per GPU, without machines that have less than
    half of the largest one's CPUs. More workers than that get fewer CPUs each.

    Args:
        workers, threads: number of workers, and CPUs of each; None to choose.
    """
    usable = [each for each in machines if each.cpus and (each.gpus or not on_gpu)]
    if not usable:
        missing = "GPU: omit --gpu-layers" if on_gpu else "CPUs: add machines to it"
        raise SettingsError(f"the Ray cluster has no {missing}")

    def room(cpus: int) -> int:
        fitting = [each.cpus // cpus for each in usable]
        return sum(map(min, fitting, [each.gpus for each in usable]) if on_gpu else fitting)

    cpus = threads
    if cpus is None:
        fair = [max(1, each.cpus // each.gpus) if on_gpu else each.cpus for each in usable]
        cpus = min(each for each in fair if 2 * each >= max(fair))
        while cpus > 1 and room(cpus) < (workers or 1):
            cpus -= 1
    most = room(cpus)
    if most < (workers or 1):
        raise SettingsError(
            f"the Ray cluster fits {most} workers with {cpus} CPUs each, not {workers or 1}: give "
            "fewer --workers or --threads"
        )
    return Share(workers or most, cpus, int(on_gpu))


class RayRunner:
    """Answers requests on the cluster that this process has joined."""

    def __init__(
        self, job: Job, share: Share, requests: Sequence[BatchRequest], check: Callable[[], None]
    ) -> None:
        """Start the workers and wait until one is ready; `check` is called repeatedly."""
        self.model = job.model
        self._ray = import_module("ray")
        self._requests = iter(requests)
        self._texts = job.texts
        self._stopped = False
        # by Ray's reference: the worker, and its request or None for a greeting
        self._asked: dict[Any, tuple[Any, BatchRequest | None]] = {}
        options = self._ray.remote(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_concurrency=job.texts,
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
        )
        self._workers = [options(Worker).remote(job) for _ in range(share.workers)]
        for worker in self._workers:
            self._asked[worker.answer.remote(None)] = (worker, None)
        self.settings: dict[str, Any] = {}
        while not self.settings:
            check()
            self._next()
        self.caches = f"{share.workers} x {job.texts} x {mib_text(self._cache_bytes)} MiB"

    def stop(self) -> None:
        """Stop as `LocalRunner` does; the workers end when this process leaves the cluster."""
        self._stopped = True

    def results(self) -> Generator[Result | None, None, None]:
        """Answer the requests as `LocalRunner` does."""
        while self._asked and not self._stopped:
            yield self._next()

    def _next(self) -> Result | None:
        """Return a request with its answer; None for a greeting, or after `TICK` seconds."""
        done, _ = self._ray.wait(list(self._asked), timeout=TICK)
        if not done:
            return None
        worker, request = self._asked.pop(done[0])
        try:
            about, line = self._ray.get(done[0])
        except self._ray.exceptions.RayTaskError as error:
            raise BatchError(str(error.cause)) from None
        except self._ray.exceptions.RayError as error:
            raise ServerError(
                f"Ray failed ({_reason(error)}): use --verbose for its log, and repeat the same "
                "command to resume"
            ) from None
        self.settings = self.settings or about["settings"]
        if about["settings"] != self.settings:
            raise BatchError(
                f"the cache on {about['machine']} has other settings than on earlier machines: "
                "install the same build of pyh2o on all machines"
            )
        self._cache_bytes = about["cache_bytes"]
        for asked in [next(self._requests, None) for _ in range(1 if request else self._texts)]:
            if asked is not None:
                self._asked[worker.answer.remote(asked)] = (worker, asked)
        if request is None:
            return None
        return request, line


def _reason(error: Exception) -> str:
    """Return the last line of Ray's error, which has the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else type(error).__name__
