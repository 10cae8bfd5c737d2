"""The process that Ray is in: it joins the cluster, and hands requests to the workers there."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from ..openai.server.refusals import one_line
from .ray_cluster import OWN, Failed, Machine, Share, Start
from .ray_worker import GREETING, Job, Worker
from .reading import BatchRequest

# How often a worker that has died is started again, and a request with which one has died is tried
# again: without a limit, one that kills workers would do so for ever.
RETRIES = 2


def serve(connection: Connection) -> None:
    """Send the machines of the cluster, and then what its workers return, as it comes.

    Args:
        connection: says `Start`, and then the job, the share and the requests. If it is closed, or
            at SIGTERM, the process ends, and with it what it has started.
    """
    start: Start = connection.recv()
    signal.signal(signal.SIGTERM, _end)
    try:
        ray = import_module("ray")
        try:
            _work(ray, start, connection)
        except Exception as error:
            with suppress(OSError):  # if nobody asks any more
                connection.send(Failed(_reason(error)))
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ray.shutdown()
    except SystemExit:
        pass


def _end(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break the end off
    raise SystemExit


def _work(ray: Any, start: Start, connection: Connection) -> None:
    own = {"include_dashboard": False, "_temp_dir": start.folder} if start.address == OWN else {}
    ray.init(start.address or None, log_to_driver=start.verbose, **own)
    signal.signal(signal.SIGTERM, _end)  # in the place of Ray's
    alive = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    connection.send([Machine(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in alive])
    job, share, requests = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    for row in _answered(job, share, requests):
        connection.send(row)


def _end_with(connection: Connection) -> None:
    """End this process when the other one has ended, which says nothing more."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def _answered(job: Job, share: Share, requests: Sequence[BatchRequest]) -> Iterable[dict[str, Any]]:
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
    rows_answered: Iterable[dict[str, Any]] = answers.iter_rows()
    return rows_answered


def _reason(error: Exception) -> str:
    """The line of an error of Ray's that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else type(error).__name__
