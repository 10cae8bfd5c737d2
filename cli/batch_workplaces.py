"""Where `pyh2o batch` has its requests answered: here, or on a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyh2o.models import find_model

from . import loading
from .options import ModelOptions
from .terminal.interrupts import Interrupts
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.batch.answering import Manner
    from pyh2o.batch.reading import BatchInput, BatchRequest
    from pyh2o.batch.workplace import Workplace


@dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
        asked: the file of requests.
        left: those that are to be answered.
        manner: for what they leave open.
        texts: that an engine answers at once.
    """

    asked: BatchInput
    left: list[BatchRequest]
    manner: Manner
    texts: int


@contextmanager
def here(options: ModelOptions, work: Work, bars: Bars) -> Iterator[Workplace]:
    """An engine in this process.

    Raises:
        PyH2OError: as `loading.load_engine`.
        KeyboardInterrupt: Ctrl-C was pressed while it was loaded.
    """
    # Imported here because it loads llama.cpp.
    from pyh2o.batch.workplace import Here

    with closing(loading.load_engine(options, bars, texts=work.texts, store_mib=0)) as engine:
        yield Here(engine, work.asked, work.left, work.manner)


@contextmanager
def on_ray(options: ModelOptions, work: Work, workers: int | None) -> Iterator[Workplace]:
    """The workers of a cluster.

    Raises:
        PyH2OError: no Ray, no cluster, no room in it, or a worker that refuses.
        KeyboardInterrupt: Ctrl-C was pressed before a worker was ready.
    """
    # Imported here because it loads llama.cpp.
    from pyh2o.batch.on_ray import OnRay
    from pyh2o.batch.ray_cluster import Cluster, check_packages, share_out
    from pyh2o.batch.ray_worker import Job
    from pyh2o.sessions.identity import file_identity

    check_packages()
    path = str(find_model(options.model).absolute())
    model = file_identity(path)
    n_gpu_layers = options.gpu_layers or 0
    with (
        Interrupts() as interrupts,
        Cluster(verbose=options.verbose, check=interrupts.check) as cluster,
    ):
        share = share_out(
            cluster.machines, workers=workers, threads=options.threads, on_gpu=n_gpu_layers != 0
        )
        n_workers = min(share.workers, len(work.left))
        terminal.say(
            f"Ray: {count(n_workers, 'worker')} with {count(share.cpus, 'CPU')} each, on "
            f"{count(len(cluster.machines), 'machine')}",
            style="dim",
        )
        job = Job(
            path,
            model,
            {
                **loading.thread_settings(options),
                **loading.cache_settings(options),
                "n_gpu_layers": n_gpu_layers,
            },
            min(work.texts, math.ceil(len(work.left) / n_workers)),
            share.cpus,
            work.asked.has_prompts,
            work.manner,
        )
        yield OnRay(cluster, job, replace(share, workers=n_workers), work.left, interrupts.check)
