"""`pyh2o bench`: speed and memory of several caches side by side."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.cache.settings import DEFAULT_POLICY
from pyh2o.measuring.speed.caches import BenchSettings, caches_to_compare, default_histories
from pyh2o.models import find_model
from pyh2o.policies import parse_policy
from pyh2o.system.threads import physical_cores

from ..errors import InputError, reported_errors
from ..loading import usable_gpu_layers
from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from ..terminal.wording import count
from .arguments import (
    new_file,
    parse_budget,
    parse_list,
    read_text,
    shared,
    show_table,
    split_policies,
    write_file,
)

if TYPE_CHECKING:
    from pyh2o.measuring.speed.caches import Cache
    from pyh2o.measuring.speed.comparison import Comparison
    from pyh2o.measuring.speed.results import HistoryResult, Report

COMPARED = "What is compared"
RESULTS = "Results"

# A token that is generated takes about as long as so many that are read: for the bar only.
READ_PER_GENERATED = 4


class Other(str, Enum):
    """Other programs that can be compared."""

    transformers = "transformers"


def bench(
    *,
    model: Annotated[Path | None, shared("model")] = None,
    ctx: Annotated[int, shared("ctx")] = 0,
    gpu_layers: Annotated[int, shared("gpu_layers")] = 0,
    threads: Annotated[int | None, shared("threads")] = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...",
            help="Lengths of text after which is measured.",
            show_default="0,4096,8192, or less for a smaller window",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="ROWS,...",
            help="Rows to keep, half heavy and half recent: fractions of the window or counts.",
            rich_help_panel=COMPARED,
        ),
    ] = "0.2,0.1",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY,...",
            help="What makes a row worth keeping, such as snap:queries=64; may be given again.",
            show_default=DEFAULT_POLICY,
            rich_help_panel=COMPARED,
        ),
    ] = None,
    kv_type: Annotated[
        str,
        typer.Option(
            metavar="TYPE,...",
            help="Types of the cached rows: f32, f16, q8_0 or q4_0.",
            rich_help_panel=COMPARED,
        ),
    ] = "f16,q8_0",
    compare: Annotated[
        Other | None,
        typer.Option(
            help="Also Hugging Face transformers on the same weights, and kvpress if installed.",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of every cache.", rich_help_panel=COMPARED)
    ] = 5,
    n: Annotated[
        int, typer.Option("-n", min=1, help="Tokens of a turn.", rich_help_panel=COMPARED)
    ] = 32,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 file to read; it is repeated if it is too short.",
            show_default="Python's own documentation",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="New file for all figures and rounds.", rich_help_panel=RESULTS),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="New file for all figures.", rich_help_panel=RESULTS)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="New PNG or SVG file for a picture.", rich_help_panel=RESULTS),
    ] = None,
) -> None:
    """Measure speed and memory on this machine: full caches against those of fixed size.

    Each cache has its own process, and they take turns. Where the output is no terminal, the tables
    are Markdown. Ctrl-C shows and keeps what has been measured.
    """
    with reported_errors():
        results = Results(json, csv, plot)
        if compare is not None:
            from pyh2o.measuring.speed.transformers_worker import check_packages

            check_packages()
        histories = None
        if history is not None:
            histories = tuple(sorted(parse_list("--history", history, int, "0,4096,8192")))
        budgets = parse_list("--budget", budget, parse_budget, "0.2,512")
        kv_types = parse_list("--kv-type", kv_type, str, "f16,q8_0")
        policies = split_policies(policy or [DEFAULT_POLICY])
        words = None if text is None else read_text(text)
        path = find_model(model)

        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.measuring.speed.model import english_text, read_model, text_tokens

        facts = read_model(path)
        window = ctx or facts.n_ctx_train
        settings = BenchSettings(
            model=path,
            window=window,
            threads=threads or physical_cores(),
            gpu_layers=usable_gpu_layers(gpu_layers),
            histories=histories or default_histories(window, rounds * n),
            budgets=budgets,
            policies=tuple(dict.fromkeys(str(parse_policy(name)) for name in policies)),
            kv_types=kv_types,
            rounds=rounds,
            n=n,
            transformers=compare is not None,
        )
        caches = caches_to_compare(
            settings, facts.n_ctx_train, kvpress=compare is not None and has_kvpress()
        )
        tokens = text_tokens(path, words or english_text(), settings.text_tokens)

        from pyh2o.measuring.speed.comparison import Comparison

        with Comparison(settings, facts, caches, tokens) as comparison:
            measure(comparison, settings, caches, results)


def has_kvpress() -> bool:
    from pyh2o.measuring.speed import transformers_worker

    return transformers_worker.has_kvpress()


def measure(
    comparison: Comparison, settings: BenchSettings, caches: list[Cache], results: Results
) -> None:
    """Run a comparison, show each table as soon as it is measured, and write the files.

    Raises:
        PyH2OError: there is too little memory, or no cache is left.
        KeyboardInterrupt: Ctrl-C; what was measured is shown and written.
    """
    from pyh2o.measuring.speed import table

    bars = MeasuringBars(settings, caches)
    shown = 0
    try:
        comparison.start(bars.starting, say_memory)
        bars.clear()
        terminal.write(table.head(comparison.report))
        for result in comparison.measure(bars.turn):
            bars.clear()
            show(comparison.report, result)
            shown += 1
            results.write_json(comparison.report)
    finally:
        bars.clear()
        for result in comparison.report.histories[shown:]:
            show(comparison.report, result)
        if comparison.report.histories:
            results.write(comparison.report)
    if failures := comparison.report.failures:
        terminal.say(f"{count(len(failures), 'cache')} could not be measured, see below the tables")


def say_memory(kv_bytes: int, needed: int, available: int | None) -> None:
    """Say what is going to be taken."""
    note = (
        f"the caches take {kv_bytes / 2**20:.1f} MiB, and {needed / 2**30:.2f} GiB with all that "
        "goes with them"
    )
    if available is not None:
        note += f"; {available / 2**30:.2f} GiB are available"
    terminal.say(note)


def show(report: Report, result: HistoryResult) -> None:
    """Print the table of a history."""
    from pyh2o.measuring.speed import table

    show_table(table.history_table(report, result))


class MeasuringBars(Bars):
    """Bars while the caches are made and while they take turns."""

    def __init__(self, settings: BenchSettings, caches: list[Cache]) -> None:
        super().__init__()
        self._done = 0
        longest = settings.histories[-1]
        generated = settings.generated * READ_PER_GENERATED
        self._total = sum(
            max((cache.target(one) for one in taken), default=0) + generated * len(taken)
            for cache in caches
            if (taken := [one for one in settings.histories if cache.takes_part(one, longest)])
        )

    def starting(self, done: int, total: int) -> None:
        """`done` of `total` caches are made."""
        self._show("making the caches", done, total, f"{done} of {total}")

    def turn(self, cache: Cache, action: str, tokens: int) -> None:
        """A cache had a turn."""
        self._done += tokens * (READ_PER_GENERATED if action == "generates" else 1)
        # What evicting caches need not read again is not known ahead.
        self._show("measuring", min(self._done, self._total - 1), self._total, cache.name)


class Results:
    """The files that the user wants; each is there as a whole or not at all."""

    def __init__(self, json: Path | None, csv: Path | None, plot: Path | None) -> None:
        """Check everything before minutes of measuring.

        Raises:
            InputError: a file exists or cannot be written.
            PyH2OError: the picture cannot be drawn.
        """
        self._json = None if json is None else new_file("--json", json)
        self._csv = None if csv is None else new_file("--csv", csv)
        self._plot = None if plot is None else new_file("--plot", plot)
        given = [path for path in (self._json, self._csv, self._plot) if path is not None]
        if len(set(given)) < len(given):
            raise InputError("--json, --csv and --plot need a file each: give different names")
        self._format = ""
        if plot is not None:
            from pyh2o.measuring.pictures import check_plot

            self._format = check_plot(plot.name)

    def write_json(self, report: Report) -> None:
        """Write what there is so far."""
        from pyh2o.measuring.speed.results import as_json

        if self._json is not None:
            write_file(self._json, as_json(report).encode())

    def write(self, report: Report) -> None:
        """Write all files."""
        from pyh2o.measuring.speed.results import as_csv

        self.write_json(report)
        if self._csv is not None:
            write_file(self._csv, as_csv(report).encode())
        if self._plot is not None:
            from pyh2o.measuring.speed.plot import picture

            write_file(self._plot, picture(report, self._format))
