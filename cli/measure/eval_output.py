"""What the measurements of `pyh2o eval` show while they run, and what they leave behind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pyh2o.measuring.pictures import check_plot
from pyh2o.measuring.tables import TextTable
from pyh2o.system.machine import machine_facts

from ..terminal.progress import Bars
from ..terminal.terminal import terminal
from .arguments import new_file, show_table, writable, write_file

if TYPE_CHECKING:
    from pyh2o.measuring.quality.results import ResultFile

    from .eval import EvalOptions

S = TypeVar("S")


class Measurement(Protocol[S]):
    """What pyh2o.measuring.quality offers for each command."""

    notes: tuple[str, ...]

    def run(self) -> None:
        """Measure what is missing."""

    def summaries(self) -> list[S]:
        """The figures of what has been measured."""


class EvalBars(Bars):
    """A bar over all that is to be done, and one for work in between."""

    def __init__(self) -> None:
        super().__init__()
        self._done = 0
        self._total = 0

    def plan(self, total: int) -> None:
        """So much will be done."""
        self._total = total

    def advance(self, label: str, amount: int) -> None:
        """So much more of it is done."""
        self._done += amount
        self._show("measuring", self._done, self._total, label)

    def extra(self, label: str, done: int, total: int) -> None:
        """Work outside the plan."""
        self._show("preparing", done, total, label)

    def note(self, text: str) -> None:
        """Say something now."""
        terminal.say(text)


class Outputs:
    """Files and tables of a run.

    Attributes:
        bars: progress.
        folder: for large files that go when the run ends.
    """

    def __init__(self, options: EvalOptions) -> None:
        """Check everything before hours of measuring.

        Raises:
            InputError: a file cannot be written, or there is a picture of that name already.
            PyH2OError: the picture cannot be drawn.
        """
        self.bars = EvalBars()
        self._json = self._plot = None
        if options.json is not None:
            self._json = writable("--json", options.json.expanduser().absolute())
        if options.plot is not None:
            self._plot = new_file("--plot", options.plot)
            self._format = check_plot(options.plot.name)
        self.folder = Path(tempfile.gettempdir()) if self._json is None else self._json.parent

    def results(
        self, kind: str, basis: Mapping[str, Any], settings: Any, *, with_arrays: bool = False
    ) -> ResultFile:
        """The file of results, begun or gone on with.

        Args:
            kind: of measurement.
            basis: what all its units have in common.
            settings: what is asked for: a record of pyh2o.measuring.quality.
            with_arrays: whether units have arrays.

        Raises:
            SettingsError: the file is something else, or was measured otherwise.
        """
        from pyh2o.measuring.quality.results import ResultFile

        self._settings = _record(settings)
        machine = machine_facts(settings.compute.threads, settings.compute.gpu_layers)
        return ResultFile(self._json, kind, basis, machine, with_arrays=with_arrays)

    def measure(
        self,
        measurement: Measurement[S],
        file: ResultFile,
        tables: Callable[[Sequence[S]], list[TextTable]],
        picture: Callable[[Sequence[S], str], bytes],
    ) -> None:
        """Run a measurement, show its tables and write its files.

        Raises:
            PyH2OError: something cannot be measured; what was measured is shown and written.
            KeyboardInterrupt: likewise.
        """
        complete = False
        try:
            measurement.run()
            complete = True
        finally:
            self.bars.clear()
            summaries = measurement.summaries()
            if summaries:
                shown = tables(summaries)
                shown[-1] = replace(shown[-1], remarks=measurement.notes)
                for table in shown:
                    show_table(table)
                file.finish(
                    self._settings,
                    [asdict(one) for one in summaries],  # type: ignore[call-overload]
                    measurement.notes,
                    complete=complete,
                )
        if self._plot is not None:
            write_file(self._plot, picture(summaries, self._format))


def _record(settings: Any) -> dict[str, Any]:
    """The settings, fit for JSON: where files lie is nobody else's business, and texts are long."""
    record: dict[str, Any] = asdict(settings)
    record["model"] = settings.model.name
    record.pop("compute")
    if "texts" in record:
        record["texts"] = [{"name": one.name, "sha256": one.sha256} for one in settings.texts]
    record.pop("prose", None)
    return record
