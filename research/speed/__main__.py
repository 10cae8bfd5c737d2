"""`pyh2o bench`: speed and memory of several caches side by side."""

from __future__ import annotations

from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pyh2o.cache.settings import DEFAULT_POLICY
from pyh2o.cli.errors import InputError, reported_errors
from pyh2o.cli.options import takes_run_options
from pyh2o.cli.terminal.terminal import terminal
from pyh2o.cli.terminal.wording import count
from pyh2o.models import find_model
from pyh2o.policies import parse_policy
from pyh2o.system.home import expanded

from ..eval.arguments import (
    COMPARED,
    PLOT,
    RESULTS,
    MeasuringOptions,
    budget_option,
    parse_budgets,
    parse_list,
    parse_recalls,
    policy_option,
    read_text,
    recall_option,
    shared,
    split_policies,
)
from ..eval.output import MeasuringBars, Picture, new_file, show_table, write_file
from .caches import BenchSettings, caches_to_compare, default_histories

if TYPE_CHECKING:
    from .comparison import Comparison
    from .figures import HistoryResult, Report


class Other(str, Enum):
    """Other programs that can be compared."""

    transformers = "transformers"
    openvino = "openvino"


@takes_run_options
def bench(
    *,
    options: MeasuringOptions,
    ctx: Annotated[int, shared("ctx")] = 0,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...",
            help="Lengths of text after which is measured.",
            show_default="0,4096,8192, or less for a smaller window",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    budget: Annotated[str, budget_option("the window")] = "0.2,0.1",
    policy: Annotated[list[str] | None, policy_option(DEFAULT_POLICY)] = None,
    recall: Annotated[str | None, recall_option("the window")] = None,
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
            help="Also another program on the same weights: Hugging Face transformers, and kvpress "
            "if installed, or OpenVINO GenAI without and with its own eviction.",
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
    plot: Annotated[Path | None, PLOT] = None,
) -> None:
    """Measure speed and memory on this machine: full caches against those of fixed size.

    Each cache has its own process, and they take turns. Where the output is no terminal, the tables
    are Markdown. Ctrl-C shows and keeps what has been measured.
    """
    with reported_errors():
        results = Results(json, csv, plot)
        if compare is not None:
            check_packages(compare)
        histories = None
        if history is not None:
            histories = tuple(sorted(parse_list("--history", history, int, "0,4096,8192")))
        budgets = parse_budgets(budget)
        kv_types = parse_list("--kv-type", kv_type, str, "f16,q8_0")
        policies = split_policies(policy or [DEFAULT_POLICY])
        recalls = parse_recalls(recall)
        words = None if text is None else read_text(text)
        path = find_model(options.model)

        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from ..eval.model import english_text, read_model, repeated_tokens
        from .comparison import Comparison
        from .transformers_worker import has_kvpress

        facts = read_model(path)
        window = ctx or facts.n_ctx_train
        settings = BenchSettings(
            model=path,
            window=window,
            compute=options.compute(),
            histories=histories or default_histories(window, rounds * n),
            budgets=budgets,
            policies=tuple(dict.fromkeys(str(parse_policy(name)) for name in policies)),
            recalls=recalls,
            kv_types=kv_types,
            rounds=rounds,
            n=n,
            transformers=compare is Other.transformers,
            openvino=compare is Other.openvino,
        )
        caches = caches_to_compare(settings, facts.n_ctx_train, kvpress=has_kvpress())
        tokens = repeated_tokens(path, words or english_text(), settings.text_tokens)
        bars = MeasuringBars()
        with closing(Comparison(settings, facts, caches, tokens, bars)) as comparison:
            measure(comparison, bars, results)


def check_packages(compare: Other) -> None:
    """Refuse to start without what another program needs.

    Raises:
        MissingPackageError: names what is missing, and the extra that brings it.
    """
    from . import openvino_worker, transformers_worker

    worker = openvino_worker if compare is Other.openvino else transformers_worker
    worker.check_packages()


def measure(comparison: Comparison, bars: MeasuringBars, results: Results) -> None:
    """Run a comparison, show each table as soon as it is measured, and write the files.

    Raises:
        PyH2OError: there is too little memory, or no cache is left.
        KeyboardInterrupt: Ctrl-C; what was measured is shown and written.
    """
    from .table import head

    shown = 0
    try:
        comparison.start()
        bars.clear()
        terminal.write(head(comparison.report))
        for result in comparison.measure():
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


def show(report: Report, result: HistoryResult) -> None:
    """Print the table of a history."""
    from .table import history_table

    show_table(history_table(report, result))


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
        self._picture = None if plot is None else Picture(plot)
        given = [one for one in (json, csv, plot) if one is not None]
        if len({expanded(one).absolute() for one in given}) < len(given):
            raise InputError("--json, --csv and --plot need a file each: give different names")

    def write_json(self, report: Report) -> None:
        """Write what there is so far."""
        from .figures import as_json

        if self._json is not None:
            write_file(self._json, as_json(report).encode())

    def write(self, report: Report) -> None:
        """Write all files."""
        from .figures import as_csv

        self.write_json(report)
        if self._csv is not None:
            write_file(self._csv, as_csv(report).encode())
        if self._picture is not None:
            from .plot import picture

            write_file(self._picture.path, picture(report, self._picture.format))
