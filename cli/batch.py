"""`pyh2o batch`: answer a file of requests, several at a time."""

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

PROMPTS = "Plain text prompts"
CLUSTER = "Cluster"
# Options for plain text prompts, which JSON requests set themselves.
OF_PROMPTS = {"max_tokens", "chat", *SAMPLING_OPTIONS} - {"seed"}


@takes_run_options
def batch(
    context: typer.Context,
    requests: Annotated[
        Path,
        typer.Argument(
            metavar="REQUESTS",
            help="JSON Lines in OpenAI's batch format, or plain text with one prompt per line.",
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
            "Until it is complete, results are in FILE.partial.",
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Start over, and replace an existing file.")
    ] = False,
    texts: Annotated[
        int,
        typer.Option(min=1, help="Requests to answer at the same time, each with its own cache."),
    ] = 8,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Use a Ray cluster: that of RAY_ADDRESS, or a running one, or else a new one on "
            "this machine.",
            rich_help_panel=CLUSTER,
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Worker processes in the cluster, each with the model and --texts caches.",
            show_default="one per machine, or per GPU",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            help="Maximum tokens of each answer.",
            show_default="the window",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Treat each line as a user message instead of a text to continue.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
) -> None:
    """Answer a file of requests, several at a time.

    Ctrl-C stops and keeps the results; the same command resumes. An invalid request gets a line
    with the error. JSON requests have their own sampling options; those of the command line apply
    to plain text prompts. --seed applies to both: request n, from 0, without a seed gets SEED + n.
    """
    given = typed_options(context)
    with reported_errors():
        from pyh2o.batch.answering import RequestDefaults
        from pyh2o.batch.journal import BatchHead, Journal
        from pyh2o.batch.reading import read_batch

        asked = read_batch(expanded(requests))
        _check_usage(asked, given)
        if workers is not None and not ray:
            raise InputError("--workers requires --ray: remove it, or give both")
        if ray and options.rpc:
            raise InputError(
                "--ray and --rpc cannot be combined: a worker has all layers of the model"
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
            if ray and left:  # otherwise only the header of the results is checked
                opened = _ray_runner(options, left, defaults, texts=texts, workers=workers)
            else:
                opened = _local_runner(options, left, defaults, texts=texts, bars=bars)
            n_all = len(asked.requests)
            with opened as runner:
                journal.start(BatchHead.of(asked, runner, defaults, replaces=force), restart=force)
                done = _answer_all(runner, journal, n_all, bars)
                seed_used = f"seed {defaults.sampling.seed}"
                terminal.say(" · ".join([*done, seed_used, f"KV {runner.caches}"]))
            if journal.n_done < n_all:
                terminal.say("to resume: run the same command" + " without --force" * force)
                raise typer.Exit(EXIT_INTERRUPTED)
            journal.finish(n_all)
            terminal.say(f"the results are in {output}")


def _check_usage(asked: BatchInput, given: set[str]) -> None:
    wrong = sorted(OF_PROMPTS & given)
    if wrong and not asked.has_prompts:
        raise InputError(
            f"{wrong[0]} is for plain text prompts: set it in the bodies of JSON requests"
        )


def _checked_output(output: Path, requests: Path) -> Path:
    """Return the output file with symbolic links resolved."""
    target = expanded(output).resolve()
    if target == expanded(requests).resolve():
        raise InputError(f"the results would replace the requests in {output}: give another name")
    return target


def _check_replaces(journal: Journal, output: Path, *, force: bool) -> None:
    """Raise an InputError if the output exists, unless --force was given, now or originally."""
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
    from pyh2o.batch import on_ray
    from pyh2o.batch.ray_worker import Job
    from pyh2o.models.file_identity import identify

    path = str(find_model(options.model).absolute())
    model = identify(path).record()
    settings = {**loading.thread_settings(options), **loading.cache_settings(options)}
    settings["n_gpu_layers"] = options.gpu_layers or 0
    with Interrupts() as interrupts, on_ray.cluster(verbose=options.verbose) as machines:
        share = on_ray.share_out(
            machines, workers=workers, threads=options.threads, on_gpu=settings["n_gpu_layers"] != 0
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
        parts of the summary of this run.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed twice.
    """
    from pyh2o.batch.answering import usage

    if journal.n_done:
        terminal.say(f"resuming: of {count(n_all, 'request')}, {journal.n_done:,} have a result")
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
        done = f"stopped by Ctrl-C: of {done}, {journal.n_done:,} have a result"
    wrote = f"wrote {count(n_written, 'token')}"
    if speed := per_second(n_written, seconds):
        wrote += f" at {speed}"
    return [done, count(journal.n_failed, "error"), f"read {count(n_read, 'token')}", wrote]
