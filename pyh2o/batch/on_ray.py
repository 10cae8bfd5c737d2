"""A batch on a Ray cluster: Ray Data hands the requests to workers, each with an engine."""

from __future__ import annotations

import json
import pickle
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from importlib import import_module
from typing import Any

from ..cache.statistics import mib_text
from ..errors import BatchError
from ..openai.server.refusals import one_line
from .answering import usage
from .ray_cluster import Share
from .ray_worker import GREETING, Job, Worker
from .reading import BatchRequest
from .running import TICK, Result

# How often a worker that has died is started again, and a request with which one has died is tried
# again: without a limit, one that kills workers would do so for ever.
RETRIES = 2

_Row = dict[str, Any]


class OnRay:
    """A `Workplace` on the cluster that this process has joined (`ray_cluster`).

    Attributes:
        model: the fields of the model file's `ModelIdentity`.
        settings: those of each cache, as `settings_identity` has them.
        caches: how many caches there are, and the memory of one.
        tokens: of the answers that have come, prompts included.
    """

    def __init__(
        self, job: Job, share: Share, requests: Sequence[BatchRequest], check: Callable[[], None]
    ) -> None:
        """Start the workers and wait until one is ready.

        Args:
            job: of each worker.
            share: how many there are, and what each gets.
            requests: that are to be answered.
            check: called during the wait; what it raises ends it.

        Raises:
            BatchError: a worker refuses the job, or Ray fails.
            BaseException: what `check` raises.
        """
        self.model = job.model
        self.tokens = 0
        self._requests = {request.number: request for request in requests}
        self._stopped = False
        # what workers return, an error that ends the run, and a None at its end
        self._news: queue.Queue[_Row | Exception | None] = queue.Queue()
        rows = _answered(job, share, requests)
        threading.Thread(
            target=self._take, args=(rows,), name="pyh2o batch on Ray", daemon=True
        ).start()
        first = None
        while first is None:
            check()
            first = self._next()
        self._news.put(first)
        about = json.loads(first["about"])
        self.settings: dict[str, Any] = about["settings"]
        self.caches = f"{share.workers} x {job.texts} x {mib_text(about['cache_bytes'])} MiB"

    def stop(self) -> None:
        """As of `Workplace`; the workers end with the cluster, or as soon as Ray is left."""
        self._stopped = True

    def results(self) -> Generator[Result | None, None, None]:
        """As of `Workplace`."""
        while self._requests and not self._stopped:
            row = self._next()
            yield None if row is None else self._result(row)

    def _take(self, rows: Iterable[_Row]) -> None:
        try:
            for row in rows:
                self._news.put(row)
            self._news.put(None)
        except Exception as error:
            self._news.put(error)

    def _next(self) -> _Row | None:
        """What a worker has returned, or None if there is nothing for a while."""
        try:
            news = self._news.get(timeout=TICK)
        except queue.Empty:
            return None
        if isinstance(news, dict):
            if news["failure"]:
                raise BatchError(news["failure"])
            return news
        reason = "it has no more results" if news is None else _reason(news)
        raise BatchError(
            f"Ray ended without a result for {len(self._requests):,} requests ({reason}): give the "
            "same command again to go on, with --verbose to see what Ray says"
        ) from news

    def _result(self, row: _Row) -> Result | None:
        about = json.loads(row["about"])
        if about["settings"] != self.settings:
            raise BatchError(
                f"the cache on {about['machine']} has other settings than those before: let all "
                "machines have the same build of pyh2o"
            )
        request = self._requests.pop(row["number"], None)
        if request is None:  # a greeting, or what was answered twice because a worker has died
            return None
        line = json.loads(row["line"])
        self.tokens += sum(usage(line))
        return request, line


def _answered(job: Job, share: Share, requests: Sequence[BatchRequest]) -> Iterable[_Row]:
    """What the workers return, as it comes; first a greeting.

    Each request is a block of its own: so it is handed to a worker that has a free place, and its
    result comes when it is there.
    """
    data = import_module("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    rows = [{"request": GREETING}, *({"request": pickle.dumps(each)} for each in requests)]
    with warnings.catch_warnings():
        # how often to try again has no other name in Ray Data yet
        warnings.simplefilter("ignore", DeprecationWarning)
        answers = data.from_items(rows, override_num_blocks=len(rows)).map(
            Worker,
            fn_constructor_args=(job,),
            compute=data.ActorPoolStrategy(
                size=share.workers,
                max_tasks_in_flight_per_actor=job.texts,
                enable_true_multi_threading=True,
            ),
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            max_concurrency=job.texts,
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
        )
    rows_answered: Iterable[_Row] = answers.iter_rows()
    return rows_answered


def _reason(error: Exception) -> str:
    """The line of an error of Ray's that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else type(error).__name__
