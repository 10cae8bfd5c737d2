"""A batch on a Ray cluster: its workers, each with an engine, answer the requests."""

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

# How often a worker that has died is started again, and a request with which one has died is tried
# again: without a limit, one that kills workers would do so for ever.
RETRIES = 2

# -------------------------------------------------------------------------------------------------
# The cluster
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What Ray has to give of a machine.

    Attributes:
        cpus: as Ray counts them: threads of the processor, unless it was told otherwise.
        gpus: whole ones.
    """

    cpus: int
    gpus: int = 0


@dataclass(frozen=True)
class Share:
    """How many workers there are, and the CPUs and GPUs of each."""

    workers: int
    cpus: int
    gpus: int = 0


@contextmanager
def cluster(*, verbose: bool) -> Iterator[list[Machine]]:
    """The machines of the cluster that Ray finds (RAY_ADDRESS), or starts on this one.

    Raises:
        MissingPackageError: Ray is not installed.
        ServerError: it can do neither.
    """
    if find_spec("ray") is None:
        raise MissingPackageError("--ray", "ray", "ray")
    ray = import_module("ray")
    level = logging.INFO if verbose else logging.CRITICAL
    try:
        ray.init(include_dashboard=False, log_to_driver=verbose, logging_level=level)
        alive = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    except Exception as error:
        raise ServerError(
            f"Ray has no cluster ({_reason(error)}): let RAY_ADDRESS name one that runs, or none"
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
    """Decide how many workers there are, and what each gets.

    One engine that has all of a machine is faster than several that share it, and takes the memory
    of one. So the default is a worker for each machine, or for each GPU; machines with less than
    half of the largest one's CPUs are left out. More workers than that get fewer CPUs each.

    Args:
        machines: of the cluster.
        workers, threads: how many, and CPUs of each; None to decide.
        on_gpu: whether each takes a GPU.

    Raises:
        SettingsError: there is no room for so many.
    """
    usable = [each for each in machines if each.cpus and (each.gpus or not on_gpu)]
    if not usable:
        missing = "GPU: leave --gpu-layers out" if on_gpu else "CPU for work: add machines to it"
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
            f"the Ray cluster has room for {most} workers of {cpus} CPUs, not for {workers or 1}: "
            "give fewer --workers or --threads"
        )
    return Share(workers or most, cpus, int(on_gpu))


# -------------------------------------------------------------------------------------------------
# The work
# -------------------------------------------------------------------------------------------------


class RayRunner:
    """Answers requests on the cluster that this process has joined, else as `LocalRunner` does.

    Attributes:
        model, settings: as of `LocalRunner`.
        caches: how many caches there are, and the memory of one.
    """

    def __init__(
        self,
        job: Job,
        share: Share,
        requests: Sequence[BatchRequest],
        check: Callable[[], None],
    ) -> None:
        """Start the workers and wait until one is ready; `check` is called meanwhile.

        Raises:
            BatchError: a worker refuses the job.
            ServerError: Ray fails.
            BaseException: what `check` raises.
        """
        self.model = job.model
        self._ray = import_module("ray")
        self._requests = iter(requests)
        self._texts = job.texts
        self._stopped = False
        # by what Ray will have of it: whom a worker answers, None for a greeting
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
        """As of `LocalRunner`; the workers end with the cluster, or as soon as it is left."""
        self._stopped = True

    def results(self) -> Generator[Result | None, None, None]:
        """As of `LocalRunner`."""
        while self._asked and not self._stopped:
            yield self._next()

    def _next(self) -> Result | None:
        """A request with its answer; None for a greeting, or if nothing comes for a while."""
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
                f"Ray failed ({_reason(error)}): see with --verbose what it says, and give the "
                "same command again to go on"
            ) from None
        self.settings = self.settings or about["settings"]
        if about["settings"] != self.settings:
            raise BatchError(
                f"the cache on {about['machine']} has other settings than those before: let all "
                "machines have the same build of pyh2o"
            )
        self._cache_bytes = about["cache_bytes"]
        for asked in [next(self._requests, None) for _ in range(1 if request else self._texts)]:
            if asked is not None:
                self._asked[worker.answer.remote(asked)] = (worker, asked)
        if request is None:
            return None
        return request, line


def _reason(error: Exception) -> str:
    """The line of an error of Ray's that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else type(error).__name__
