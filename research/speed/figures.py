"""Figures and ratios from what was measured, and their JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pyh2o.cache.statistics import mib_text

from ..eval.caches import MeasuredCache
from ..eval.tables import column
from .caches import ELEMENT_BYTES
from .messages import KVUse
from .turns import CacheRun, Round

# The heading of a column that is shown only where a GPU was used.
GPU_MEMORY = "GPU MiB"
# Those of columns that are shown only where a cache has an archive.
RECALLING = ("archive", "attention found")


@dataclass(frozen=True)
class Range:
    """The median of the rounds, the least and the most."""

    median: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Each of the three as a number."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


@dataclass(frozen=True)
class Basis:
    """What all caches of a comparison are measured by.

    Attributes:
        full_bytes: a full f16 cache for the window, or for the text where that is longer.
        weight_bytes: what a token reads of the model: all its tensors. An embedding that is not
            the output matrix as well is counted too, and so are all experts, though a token
            needs only a row of the one and some of the others.
        bytes_per_second: that the machine's memory delivers; None where it is not known.
    """

    full_bytes: float
    weight_bytes: int
    bytes_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One cache at one history.

    Attributes:
        cache: its name.
        position: tokens of its text.
        kv_bytes: allocated for rows and scores.
        share_of_full: of Basis.full_bytes.
        peak_bytes: most memory of its process so far.
        device_bytes: memory of GPUs that its weights, cache and work space take.
        archive_bytes: memory of the archive that rows are found in.
        found_share: share of attention that these got, over the text so far; None without one.
        read_per_second: tokens, over the stretch of text up to here; None without one.
        first_token_seconds: from an empty cache to the first token after so much text.
        generated_per_second: tokens.
        ratio: to the speed of the better stock mode in the same round; None if none was measured.
        compactions: in all rounds.
        compaction_share: of the time of all rounds.
        compaction_seconds: of one compaction; None if there was none.
        bytes_per_token: that have to be read from memory for a token: weights, rows and
            scores, windows and states. What is looked at to find rows is not counted.
        roofline_per_second: tokens, if nothing but that took time; None if it is not known.
        roofline_share: of it that was reached, by the median.
    """

    cache: str = field(metadata=column("cache"))
    position: int
    kv_bytes: int = field(metadata=column("KV memory", lambda one: f"{mib_text(one.kv_bytes)} MiB"))
    share_of_full: float = field(metadata=column("of full", ".1%"))
    peak_bytes: int = field(
        metadata=column("peak MiB", lambda one: f"{one.peak_bytes / 2**20:.0f}")
    )
    device_bytes: int = field(
        metadata=column(GPU_MEMORY, lambda one: f"{one.device_bytes / 2**20:.0f}")
    )
    archive_bytes: int = field(
        default=0, metadata=column(RECALLING[0], lambda one: one.archive_shown)
    )
    found_share: float | None = field(default=None, metadata=column(RECALLING[1], ".1%"))
    read_per_second: float | None = field(metadata=column("read tok/s", ".0f"))
    first_token_seconds: float = field(metadata=column("first token s", ".2f"))
    generated_per_second: Range = field(metadata=column("generate tok/s (range)", ".1f"))
    ratio: Range | None = field(metadata=column("x full (range)", ".2f"))
    compactions: int = field(metadata=column("compactions, % of time", lambda one: one.compacted))
    compaction_share: float
    compaction_seconds: float | None
    bytes_per_token: float
    roofline_per_second: float | None
    roofline_share: float | None = field(metadata=column("of roofline", ".0%"))

    @property
    def archive_shown(self) -> str:
        """Its memory, if there is one."""
        return f"{mib_text(self.archive_bytes)} MiB" if self.archive_bytes else ""

    @property
    def compacted(self) -> str:
        """How often, and for how much of the time."""
        return f"{self.compactions}, {self.compaction_share:.1%}" if self.compactions else ""


@dataclass(frozen=True)
class HistoryResult:
    """All caches at one history; `rounds` are their raw rounds, in the same order."""

    history: int
    figures: tuple[Figures, ...]
    rounds: tuple[tuple[Round, ...], ...]


@dataclass(frozen=True)
class Report:
    """A whole comparison, or as much as there is of it.

    Attributes:
        machine: facts about the machine, the program and the model.
        settings: what was asked for.
        basis: what the figures are measured by.
        caches: all caches, in the order of the tables.
        histories: what was measured.
        failures: reason of each cache that was given up, by its name.
        notes: what to know when reading the figures.
        complete: False if it was stopped.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    basis: Basis
    caches: tuple[MeasuredCache, ...]
    histories: tuple[HistoryResult, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    complete: bool = False


def full_bytes(use: KVUse, kv_type: str, cells: int) -> float:
    """What K and V of a full f16 cache of so many cells take, told from a cache of this type."""
    per_cell = use.bytes_rows / use.cells if use.cells else 0.0
    return per_cell / ELEMENT_BYTES[kv_type] * ELEMENT_BYTES["f16"] * cells


def history_result(history: int, runs: Sequence[CacheRun], basis: Basis) -> HistoryResult:
    """The figures of all caches at one history."""
    best = _better_stock(runs)
    return HistoryResult(
        history,
        tuple(_figures(run, best, basis) for run in runs),
        tuple(run.rounds for run in runs),
    )


def _better_stock(runs: Sequence[CacheRun]) -> CacheRun | None:
    stock = [run for run in runs if run.cache.is_stock]
    return max(stock, key=lambda run: _range(_speeds(run)).median, default=None)


def _figures(run: CacheRun, best: CacheRun | None, basis: Basis) -> Figures:
    speeds = _range(_speeds(run))
    seconds = sum(one.seconds for one in run.rounds)
    compactions = sum(one.compactions for one in run.rounds)
    compacting = sum(one.compaction_seconds for one in run.rounds)
    in_use = statistics.fmean(one.bytes_in_use for one in run.rounds)
    needed = basis.weight_bytes + in_use + run.use.bytes_fixed
    roofline = None if basis.bytes_per_second is None else basis.bytes_per_second / needed
    return Figures(
        cache=run.cache.name,
        position=run.position,
        kv_bytes=run.use.bytes_total,
        share_of_full=run.use.bytes_total / basis.full_bytes,
        peak_bytes=run.peak_bytes,
        device_bytes=run.use.bytes_device,
        archive_bytes=run.use.bytes_archive,
        found_share=run.use.found_share,
        read_per_second=_read_per_second(run),
        first_token_seconds=_reading_seconds(run) + 1 / speeds.median,
        generated_per_second=speeds,
        ratio=None if best is None else _ratio(run, best),
        compactions=compactions,
        compaction_share=compacting / seconds,
        compaction_seconds=compacting / compactions if compactions else None,
        bytes_per_token=needed,
        roofline_per_second=roofline,
        roofline_share=None if roofline is None else speeds.median / roofline,
    )


def _speeds(run: CacheRun) -> list[float]:
    return [one.tokens / one.seconds for one in run.rounds]


def _ratio(run: CacheRun, best: CacheRun) -> Range:
    """Round by round, because two caches have their turns of a round shortly after each other."""
    return _range(
        [own / other for own, other in zip(_speeds(run), _speeds(best), strict=True)],
    )


def _range(values: Sequence[float]) -> Range:
    return Range(statistics.median(values), min(values), max(values))


def _read_per_second(run: CacheRun) -> float | None:
    if not run.readings or not run.readings[-1].seconds:
        return None
    return run.readings[-1].tokens / run.readings[-1].seconds


def _reading_seconds(run: CacheRun) -> float:
    """All text so far as a prompt.

    What a cache that could not go back had not to read counts as much as the rest of its stretch.
    """
    return sum(
        reading.seconds * reading.stretch / reading.tokens
        for reading in run.readings
        if reading.tokens
    )


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """Everything, with the raw rounds of each cache among its figures."""
    data = asdict(report)
    for history in data["histories"]:
        rounds = history.pop("rounds")
        for figures, own in zip(history["figures"], rounds, strict=True):
            figures["rounds"] = own
    data["failures"] = dict(report.failures)
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def as_csv(report: Report) -> str:
    """A line for each cache and history; a range takes three columns."""
    text = io.StringIO()
    columns = ["history"]
    for one in fields(Figures):
        is_range = one.name in ("generated_per_second", "ratio")
        columns += [one.name, *([f"{one.name}_{end}" for end in ("low", "high")] * is_range)]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for result in report.histories:
        for figures in result.figures:
            writer.writerow({"history": result.history, **_flat(figures)})
    return text.getvalue()


def _flat(figures: Figures) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for one in fields(Figures):
        value = getattr(figures, one.name)
        if isinstance(value, Range):
            row[one.name] = value.median
            row[f"{one.name}_low"], row[f"{one.name}_high"] = value.low, value.high
        else:
            row[one.name] = value
    return row
