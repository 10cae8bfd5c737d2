"""The outline of what measures quality: what is wanted, what a unit measures, how units sum up.

A measurement is wanted for many caches and samples, each of which is a unit of its file of results.
What the file has already is not measured again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy.typing as npt

from pyh2o.cache.settings import EvictionSettings, Positions
from pyh2o.errors import SettingsError
from pyh2o.llama import Llama, check_file
from pyh2o.policies import parse_policy
from pyh2o.sessions.identity import file_identity
from pyh2o.system.machine import machine_facts

from .caches import (
    FULL,
    FULL_CACHE,
    Compute,
    MeasuredCache,
    budget_name,
    check_full,
    is_streaming,
    open_llama,
    parts_of,
    recall_name,
)
from .results import ResultFile
from .tables import TextTable, column


class Progress(Protocol):
    """Told what goes on, in units of work of the same size."""

    def plan(self, total: int) -> None:
        """So much will be done."""

    def advance(self, label: str, amount: int) -> None:
        """So much more of it is done."""

    def extra(self, label: str, done: int, total: int) -> None:
        """Work outside the plan."""

    def note(self, text: str) -> None:
        """Something that the user should know now."""


# -------------------------------------------------------------------------------------------------
# What is asked for
# -------------------------------------------------------------------------------------------------


def default_recent_share() -> float:
    """The recent rows' share of what a default budget does not pin."""
    default = EvictionSettings()
    return default.recent / (default.hh + default.recent)


def policy_named(text: str) -> str:
    """A policy or "full" as it is written everywhere, with no parameter that is the default.

    Raises:
        SettingsError: there is no such policy or parameter.
    """
    return FULL if text == FULL else str(parse_policy(text))


@dataclass(frozen=True)
class CacheSettings:
    """The caches that are compared with the full one.

    Attributes:
        policies: such as "h2o" or "snap:queries=64", each as `str` of it is; "full" is the full
            cache.
        budgets: rows to keep: fractions of the text's tokens (float) or counts (int).
        recent_share: of the rows that are not pinned, kept because they are recent.
        pinned: first positions that are never evicted; they are a part of the budget.
        positions: schemes for the rotary embeddings.
        recalls: rows of the budget that are found among the evicted ones: fractions or counts
            likewise; 0 is a cache without an archive, None the part that the settings have by
            default. Sinks and a window alone, which the others are measured by, never find any.
    """

    policies: tuple[str, ...]
    budgets: tuple[float | int, ...]
    recent_share: float
    pinned: int = 0
    positions: tuple[Positions, ...] = ("original",)
    recalls: tuple[float | int | None, ...] = (None,)

    def __post_init__(self) -> None:
        """Refuse what makes no sense with any text.

        Raises:
            SettingsError: nothing to compare, or a share out of its range.
        """
        if not (self.policies and self.budgets and self.positions and self.recalls):
            raise SettingsError(
                "give at least one --policy, one --budget, one --positions and one --recall"
            )
        if not 0 < self.recent_share <= 1:
            raise SettingsError(
                f"--recent-share {self.recent_share:g}: give more than 0 and at most 1"
            )
        for budget in self.budgets:
            _check_fraction("--budget", budget)
        for recall in self.recalls:
            if recall is not None:
                _check_fraction("--recall", recall)

    def for_text(self, tokens: int) -> list[MeasuredCache]:
        """The full cache and all others for so many tokens, in the order in which they are shown.

        Raises:
            SettingsError: a budget without room for a row that is not pinned.
        """
        caches = [FULL_CACHE]
        evicting = [policy for policy in self.policies if policy != FULL]
        for budget, policy, positions in product(self.budgets, evicting, self.positions):
            alone = is_streaming(policy)
            for recall in (0,) if alone else self.recalls:
                name = [policy, budget_name(budget)]
                name += [] if positions == "original" else [positions]
                name += [] if alone or recall is None else [recall_name(recall)]
                parts = parts_of(
                    budget,
                    tokens,
                    recent_share=self.recent_share,
                    pinned=self.pinned,
                    recall=recall,
                )
                caches.append(
                    MeasuredCache(
                        ", ".join(name),
                        policy=policy,
                        budget=budget_name(budget),
                        positions=positions,
                        **parts,
                    )
                )
        return caches


def _check_fraction(option: str, rows: float | int) -> None:
    if isinstance(rows, float) and rows > 1:
        raise SettingsError(
            f"{option} {rows} is more than the whole text: give a fraction up to 1.0, or a whole "
            "number of rows"
        )


@dataclass(frozen=True, kw_only=True)
class QualitySettings:
    """What the user asks for, of every measurement.

    Attributes:
        model: a GGUF file.
        compute: what computes.
        caches: what is compared.
    """

    model: Path
    compute: Compute
    caches: CacheSettings

    def options(self) -> dict[str, Any]:
        """Options of the command that change the numbers of every unit."""
        return {}

    def basis(self) -> dict[str, Any]:
        """What the units of a file have in common, by the names that people know.

        What only decides which units there are, such as budgets and texts, is no part of it: a
        later run may add some. A GPU rounds otherwise than the CPU, and so may other machines.

        Raises:
            ModelError: the model's file is missing or no model.
        """
        check_file(str(self.model))
        identity = file_identity(str(self.model))
        facts = machine_facts(1)
        return {
            "--model": f"{identity['file']} ({identity['bytes']} bytes, {identity['sha256'][:12]})",
            **{name: facts[name] for name in ("pyh2o", "llama_cpp_commit", "patches")},
            "--gpu-layers": self.compute.gpu_layers,
            **({"--rpc": len(servers)} if (servers := self.compute.rpc_servers) else {}),
            "--recent-share": self.caches.recent_share,
            "--pinned": self.caches.pinned,
            **{f"--{name}": value for name, value in self.options().items()},
        }

    def record(self) -> dict[str, Any]:
        """For the file of results: where files lie is nobody else's business."""
        record: dict[str, Any] = {**asdict(self), "model": self.model.name}
        del record["compute"]
        return record


# -------------------------------------------------------------------------------------------------
# What is measured
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OfCache:
    """What is told of a cache wherever something of it is told.

    Attributes:
        cache: its name.
        policy, budget, rows: see MeasuredCache.
        capacity: rows that it has at most, just before a compaction; 0 without a limit.
        recall: of the rows those that it finds among the evicted ones.
    """

    cache: str = field(metadata=column("cache"))
    policy: str
    budget: str
    rows: int = field(metadata=column("rows (at most)", lambda one: one.rows_at_most))
    capacity: int
    recall: int = 0

    @property
    def rows_at_most(self) -> str:
        """Those in the cache, which fills up its slack between two compactions, and those found."""
        own = f"{self.rows - self.recall} ({self.capacity})" if self.rows else ""
        return f"{own} + {self.recall}" if self.recall else own

    @property
    def but_for_budget(self) -> str:
        """Its name without the budget, which caches have in common that differ in that only."""
        return self.cache.replace(f", {self.budget}", "")

    def of_cache(self) -> dict[str, Any]:
        """These fields alone, for another record."""
        return {one.name: getattr(self, one.name) for one in fields(OfCache)}


@dataclass(frozen=True, kw_only=True)
class Unit(OfCache):
    """What was measured of one cache at once.

    Attributes:
        seconds: it took.
    """

    seconds: float = 0.0


@dataclass(frozen=True)
class Job(ABC):
    """A unit that is wanted: its cache, and what else tells it from others."""

    cache: MeasuredCache

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the unit in its file."""

    @property
    def opening(self) -> Hashable:
        """Jobs for which this is the same can share an opened cache."""
        return self.cache


T = TypeVar("T")
Q = TypeVar("Q", bound=QualitySettings)
J = TypeVar("J", bound=Job)
U = TypeVar("U", bound=Unit)
S = TypeVar("S", bound=OfCache)


class Measurement(ABC, Generic[Q, J, U, S]):
    """A measurement, from what is wanted to its tables and its picture.

    A class of its own says in `wanted`, `work`, `opened` and `measured` what is done, and in
    `summaries`, `tables` and `picture` what it comes to.

    Attributes:
        kind: the name of its command.
        unit: the record of what is measured at once.
        arrays: names of the arrays that a unit has.
        notes: what to know when reading the figures.
    """

    kind: ClassVar[str]
    unit: type[U]
    arrays: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: Q, file: ResultFile, progress: Progress) -> None:
        """Look at the model and what is asked for; nothing is measured yet.

        Args:
            settings: what is asked for.
            file: where the results go.
            progress: told what goes on.

        Raises:
            PyH2OError: the model is refused, or something that is asked for makes no sense.
        """
        self.notes: tuple[str, ...] = ()
        self._settings = settings
        self._file = file
        self._progress = progress

    @abstractmethod
    def wanted(self) -> list[J]:
        """All units, in the order in which they are shown."""

    @abstractmethod
    def work(self, job: J) -> int:
        """What `measured` tells its progress in all."""

    @abstractmethod
    def opened(self, job: J) -> Llama:
        """The cache of a job."""

    def measured(self, llm: Llama, job: J) -> U:
        """Measure a unit; where `run` is another, it need not be there."""
        raise NotImplementedError

    @abstractmethod
    def summaries(self) -> list[S]:
        """The figures of all that has been measured, in the order in which it was asked for."""

    @abstractmethod
    def tables(self, summaries: Sequence[S]) -> list[TextTable]:
        """The figures as tables; none if nothing was measured."""

    @abstractmethod
    def picture(self, summaries: Sequence[S], file_format: str) -> bytes:
        """The figures as a picture: the bytes of a file."""

    def run(self) -> None:
        """Measure what the file has not.

        Raises:
            PyH2OError: a cache is refused, or there is too little memory or disk space.
        """
        for jobs in self._planned(lambda job: job.opening):
            with self.opened(jobs[0]) as llm:
                for job in jobs:
                    started = time.perf_counter()
                    unit = self.measured(llm, job)
                    if job.cache.is_full:
                        check_full(llm)
                    self._add(job, unit, started)

    def _open(self, cache: MeasuredCache, window: int, **more: Any) -> Llama:
        """The model with a cache (see `open_llama`)."""
        settings = self._settings
        return open_llama(settings.model, cache, window=window, compute=settings.compute, **more)

    def _planned(self, opening: Callable[[J], Hashable]) -> Iterable[list[J]]:
        """What is missing, in groups; all of it is told to the progress."""
        missing = [job for job in self.wanted() if not self._is_measured(job)]
        self._progress.plan(sum(map(self.work, missing)))
        return grouped(missing, opening).values()

    def _is_measured(self, job: J) -> bool:
        return self._file.has(job.name, *self.arrays)

    def _add(
        self, job: J, unit: U, started: float, arrays: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> None:
        seconds = round(time.perf_counter() - started, 3)
        self._file.add(job.name, asdict(replace(unit, seconds=seconds)), arrays)

    def _units(self) -> list[U]:
        """What has been measured of all that is wanted."""
        return [self._unit_of(job) for job in self.wanted() if self._is_measured(job)]

    def _unit_of(self, job: J) -> U:
        try:
            return self.unit(**self._file.units[job.name])
        except TypeError:
            raise SettingsError(
                f"the file of results is damaged ({job.name} has other figures than it should): "
                "remove it"
            ) from None


def told_of(cache: MeasuredCache, llm: Llama | None) -> dict[str, Any]:
    """The fields of OfCache; there is no capacity without a model."""
    return {
        "cache": cache.name,
        "policy": cache.policy,
        "budget": cache.budget,
        "rows": cache.rows,
        "capacity": 0 if cache.is_full or llm is None else llm.kv.capacity,
        "recall": cache.recall,
    }


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Items by a key, in the order of their first ones."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
