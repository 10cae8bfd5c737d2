"""`pyh2o batch`: a file of requests, answered many at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.models import find_model
from pyh2o.system.home import expanded
from pyh2o.writing.sampling import RANDOM_SEEDS

from . import loading
from .errors import EXIT_INTERRUPTED, InputError, reported_errors
from .options import SAMPLING_OPTIONS, RunOptions, takes_run_options
from .session_options import typed_options
from .terminal.interrupts import Interrupts
from .terminal.progress import Bars
from .terminal.terminal import terminal
from .terminal.wording import count, per_second

if TYPE_CHECKING:
    from pyh2o.batch.answering import RequestDefaults
    from pyh2o.batch.journal import Journal
    from pyh2o.batch.local import LocalRunner
    from pyh2o.batch.on_ray import RayRunner
    from pyh2o.batch.reading import BatchInput, BatchRequest

PROMPTS = "Prompts of plain text"
CLUSTER = "Cluster"
# Options that say what requests say themselves.
OF_PROMPTS = {"max_tokens", "chat", *SAMPLING_OPTIONS} - {"seed"}


@takes_run_options
def batch(
    context: typer.Context,
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS",
            help="JSON Lines in OpenAI's batch format, or plain text with a prompt on each line.",
        ),
    ],
    *,
    options: RunOptions,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File for the results, in OpenAI's output format and the order of the requests. "
            "Until all are there they are in FILE.partial.",
        ),
    ],
    force: Annotated[
        bool,
        typer.Option("--force", help="Begin anew, and replace an existing file."),
    ] = False,
    texts: Annotated[
        int,
        typer.Option(min=1, help="Requests that are answered at once, each with a cache."),
    ] = 8,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Let the machines of a Ray cluster answer: that of RAY_ADDRESS or the one that "
            "runs here, else a new one of this machine.",
            rich_help_panel=CLUSTER,
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes of the cluster that answer, each with the model and --texts caches.",
            show_default="one on each machine, or for each GPU",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="Most tokens of each answer.",
            show_default="as many as the window has",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Each line is a user's message, and not a text to go on with.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
) -> None:
    """Answer a file of requests, many at once.

    Ctrl-C ends it and keeps the results that are there; the same command goes on with the others.
    A request that is wrong gets a line that says why. Sampling is each request's own; the sampling
    options are for prompts of plain text, but for --seed: request n, from 0, without a seed gets
    SEED + n.
    """
    given = typed_options(context)
    with reported_errors():
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.batch.answering import RequestDefaults
        from pyh2o.batch.journal import BatchHead, Journal
        from pyh2o.batch.reading import read_batch

        asked = read_batch(expanded(requests))
        _check_usage(asked, given)
        if workers is not None and not ray:
            raise InputError("--workers is for --ray: leave it out, or give both")
        if ray and options.rpc:
            raise InputError(
                "--ray and --rpc exclude each other: a worker has all layers of the model"
            )
        target = _checked_output(output, requests)
        loading.check_model_stays(options, target)
        with Journal(target) as journal:
            _check_replaces(journal, output, force=force)
            defaults = RequestDefaults(options.sampling, max_tokens, chat)
            has_seed = "seed" in given and context.params["seed"] not in RANDOM_SEEDS
            if journal.head is not None and not force and not has_seed:
                seed = journal.head.defaults.sampling.seed
                defaults = replace(defaults, sampling=replace(defaults.sampling, seed=seed))
            left = [each for each in asked.requests if force or each.number not in journal]
            bars = Bars(hidden=options.verbose)
            if ray and left:  # else the head is checked, and there is no more to do
                opened = _ray_runner(options, left, defaults, texts=texts, workers=workers)
            else:
                opened = _local_runner(options, left, defaults, texts=texts, bars=bars)
            n_all = len(asked.requests)
            with opened as runner:
                journal.start(BatchHead.of(asked, runner, defaults, replaces=force), restart=force)
                done = _answer_all(runner, journal, n_all, bars)
                drawn = f"seed {defaults.sampling.seed}"
                terminal.say(" · ".join([*done, drawn, f"KV {runner.caches}"]))
            if journal.n_done < n_all:
                terminal.say("to go on: give the same command again" + " without --force" * force)
                raise typer.Exit(EXIT_INTERRUPTED)
            journal.finish(n_all)
            terminal.say(f"the results are in {output}")


def _check_usage(asked: BatchInput, given: set[str]) -> None:
    wrong = sorted(OF_PROMPTS & given)
    if wrong and not asked.has_prompts:
        raise InputError(
            f"{wrong[0]} is for prompts of plain text: requests in JSON say it in their bodies"
        )


def _checked_output(output: Path, requests: Path) -> Path:
    """The file of the results, with symbolic links followed."""
    target = expanded(output).resolve()
    if target == expanded(requests).resolve():
        raise InputError(f"the results would replace the requests in {output}: give another name")
    return target


def _check_replaces(journal: Journal, output: Path, *, force: bool) -> None:
    """Refuse to replace a file, unless this run or the one that it goes on with was told to."""
    if force or (journal.head is not None and journal.head.replaces):
        return
    if expanded(output).exists():
        raise InputError(f"{output} exists: give another --output, or replace it with --force")


@contextmanager
def _local_runner(
    options: RunOptions,
    left: list[BatchRequest],
    defaults: RequestDefaults,
    *,
    texts: int,
    bars: Bars,
) -> Iterator[LocalRunner | RayRunner]:
    """An engine in this process.

    Raises:
        PyH2OError: as `loading.load_engine`.
        KeyboardInterrupt: Ctrl-C was pressed while it was loaded.
    """
    # Imported here because it loads llama.cpp.
    from pyh2o.batch.local import LocalRunner

    n_texts = max(1, min(texts, len(left)))
    with closing(loading.load_engine(options, bars, texts=n_texts, store_mib=0)) as engine:
        yield LocalRunner(engine, left, defaults)


@contextmanager
def _ray_runner(
    options: RunOptions,
    left: list[BatchRequest],
    defaults: RequestDefaults,
    *,
    texts: int,
    workers: int | None,
) -> Iterator[LocalRunner | RayRunner]:
    """The workers of a cluster.

    Raises:
        PyH2OError: no Ray, no cluster, no room in it, or a worker that refuses.
        KeyboardInterrupt: Ctrl-C was pressed before a worker was ready.
    """
    # Imported here because it loads llama.cpp.
    from pyh2o.batch import on_ray
    from pyh2o.batch.ray_worker import Job
    from pyh2o.models.file_identity import identify

    path = str(find_model(options.model).absolute())
    model = identify(path).record()
    settings = {**loading.thread_settings(options), **loading.cache_settings(options)}
    settings["n_gpu_layers"] = options.gpu_layers or 0
    with Interrupts() as interrupts, on_ray.cluster(verbose=options.verbose) as machines:
        share = on_ray.share_out(
            machines,
            workers=workers,
            threads=options.threads,
            on_gpu=settings["n_gpu_layers"] != 0,
        )
        share = replace(share, workers=min(share.workers, len(left)))
        terminal.say(
            f"Ray: {count(share.workers, 'worker')} with {count(share.cpus, 'CPU')} each, on "
            f"{count(len(machines), 'machine')}",
            style="dim",
        )
        n_texts = min(texts, math.ceil(len(left) / share.workers))
        job = Job(path, model, settings, n_texts, share.cpus, defaults)
        yield on_ray.RayRunner(job, share, left, interrupts.check)


def _answer_all(
    runner: LocalRunner | RayRunner, journal: Journal, n_all: int, bars: Bars
) -> list[str]:
    """Answer the requests that have no result, until Ctrl-C is pressed.

    Returns:
        What there is now, and what this run has done for it.

    Raises:
        PyH2OError: the results cannot be written, or the runner fails.
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    from pyh2o.batch.answering import usage

    if journal.n_done:
        terminal.say(f"going on: of {count(n_all, 'request')} {journal.n_done:,} have a result")
    n_read = n_written = 0
    seconds, started = 0.0, time.monotonic()
    try:
        with Interrupts() as interrupts, closing(runner.results()) as results:
            for result in results:
                if result is not None:
                    request, line = result
                    journal.add(request.number, line)
                    used = usage(line)
                    n_read, n_written = n_read + used[0], n_written + used[1]
                seconds = time.monotonic() - started
                bars.show("answering", journal.n_done, n_all, "requests")
                if interrupts.presses:
                    runner.stop()
    finally:
        bars.clear()
    done = count(n_all, "request")
    if journal.n_done < n_all:
        done = f"stopped by Ctrl-C: of {done} {journal.n_done:,} have a result"
    wrote = f"wrote {count(n_written, 'token')}"
    if speed := per_second(n_written, seconds):
        wrote += f" at {speed}"
    return [done, count(journal.n_failed, "error"), f"read {count(n_read, 'token')}", wrote]
