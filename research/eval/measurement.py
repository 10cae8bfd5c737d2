"""The outline of what measures quality: what is wanted, what a unit measures, and its tables.

A measurement is wanted for many caches and samples, each of which is a unit of its file of results.
What the file has already is not measured again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from pyh2o.compat.llama import Llama
from pyh2o.errors import SettingsError
from pyh2o.library.devices import machine_facts
from pyh2o.models.damage import check_file
from pyh2o.models.file_identity import identify
from pyh2o.policies import parse_policy

from .arguments import say
from .caches import (
    FULL,
    FULL_CACHE,
    Compute,
    MeasuredCache,
    Rows,
    budget_name,
    check_full,
    is_streaming,
    open_llama,
    parts_of,
    recall_name,
)
from .results import ResultFile, Unit
from .tables import Column, TextTable


def policy_named(text: str) -> str:
    """A policy or "full" as it is written everywhere, with no parameter that is the default."""
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
        recalls: rows of the budget that are found among the evicted ones, likewise; 0 is a cache
            without an archive, None the part that the settings have by default. Sinks and a window
            alone, which the others are measured by, never find any.
    """

    policies: tuple[str, ...]
    budgets: tuple[Rows, ...]
    recent_share: float = 0.5
    pinned: int = 0
    recalls: tuple[Rows | None, ...] = (None,)

    def for_text(self, tokens: int) -> list[MeasuredCache]:
        """The full cache and all others for so many tokens, in the order in which they are shown.

        Raises:
            SettingsError: a share out of its range, or a budget without room for a row that is not
                pinned.
        """
        if not 0 < self.recent_share <= 1:
            raise SettingsError(
                f"--recent-share {self.recent_share:g}: give more than 0 and at most 1"
            )
        caches = [FULL_CACHE]
        evicting = [policy for policy in self.policies if policy != FULL]
        for budget, policy in product(self.budgets, evicting):
            alone = is_streaming(policy)
            for recall in (0,) if alone else self.recalls:
                name = [policy, budget_name(budget)]
                name += [] if alone or recall is None else [recall_name(recall)]
                parts = parts_of(
                    budget,
                    tokens,
                    recent_share=self.recent_share,
                    pinned=self.pinned,
                    recall=recall,
                )
                one = MeasuredCache(
                    ", ".join(name),
                    policy=policy,
                    budget=budget_name(budget),
                    **parts,
                )
                caches.append(one)
        return caches


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asks for in every measurement: a GGUF file, what computes, which caches."""

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
        identity = identify(self.model).record()
        facts = machine_facts(1)
        return {
            "--model": f"{identity['file']} ({identity['bytes']} bytes, {identity['sha256'][:12]})",
            **{name: facts[name] for name in ("pyh2o", "llama_cpp_commit", "patches")},
            "--gpu-layers": self.compute.gpu_layers,
            "--rpc": len(self.compute.rpc_servers),
            "--recent-share": self.caches.recent_share,
            "--pinned": self.caches.pinned,
            **{f"--{name}": value for name, value in self.options().items()},
        }


@dataclass(frozen=True)
class Job:
    """A unit that is wanted: its cache, what it is measured on, and its name in the file.

    Jobs for which `opening` is the same can share an opened cache.
    """

    cache: MeasuredCache
    name: str
    what: Any
    opening: Hashable


T = TypeVar("T")
Q = TypeVar("Q", bound=Settings)


class Measurement(ABC, Generic[Q]):
    """A measurement, from what is wanted to its tables.

    Attributes:
        kind: the name of its command.
        notes: what to know when reading the figures.
    """

    kind: ClassVar[str]

    def __init__(self, settings: Q, file: ResultFile) -> None:
        """Look at the model and what is asked for; nothing is measured yet.

        Args:
            settings: what is asked for.
            file: where the results go.

        Raises:
            PyH2OError: the model is refused, or something that is asked for makes no sense.
        """
        self.notes: tuple[str, ...] = ()
        self._settings = settings
        self._file = file

    @abstractmethod
    def wanted(self) -> list[Job]:
        """All units, in the order in which they are shown."""

    @abstractmethod
    def opened(self, job: Job) -> Llama:
        """The cache of a job."""

    @abstractmethod
    def measured(self, llm: Llama, job: Job) -> Unit:
        """The figures of a unit."""

    @abstractmethod
    def tables(self) -> list[TextTable]:
        """The figures of all that has been measured; none if nothing was."""

    def run(self) -> None:
        """Measure what the file has not.

        Raises:
            PyH2OError: a cache is refused, or there is too little memory or disk space.
        """
        for jobs in grouped(self._missing(), lambda job: job.opening).values():
            with self.opened(jobs[0]) as llm:
                for job in jobs:
                    self._measure(llm, job)

    def _measure(self, llm: Llama, job: Job) -> None:
        started = time.perf_counter()
        unit = self.measured(llm, job)
        if job.cache.is_full:
            check_full(llm)
        seconds = time.perf_counter() - started
        self._file.add(job.name, {**told_of(job.cache, llm), **unit, "seconds": round(seconds, 3)})
        say(f"{job.name}: {seconds:.0f} s, {len(self._missing())} to do")

    def _missing(self) -> list[Job]:
        return [job for job in self.wanted() if job.name not in self._file.units]

    def _open(self, cache: MeasuredCache, window: int, **more: Any) -> Llama:
        """The model with a cache (see `open_llama`)."""
        settings = self._settings
        return open_llama(settings.model, cache, window=window, compute=settings.compute, **more)

    def _units(self) -> list[Unit]:
        """What has been measured of all that is wanted."""
        units = self._file.units
        return [units[job.name] for job in self.wanted() if job.name in units]


def told_of(cache: MeasuredCache, llm: Llama | None) -> Unit:
    """What is told of a cache wherever something of it is told; no capacity without a model."""
    return {
        "cache": cache.name,
        "policy": cache.policy,
        "budget": cache.budget,
        "rows": cache.rows,
        "capacity": 0 if cache.is_full or llm is None else llm.kv.capacity,
        "recall": cache.recall,
    }


def _rows(unit: Unit) -> str:
    """Those in the cache, which fills up its slack between two compactions, and those found."""
    own = f"{unit['rows'] - unit['recall']} ({unit['capacity']})" if unit["rows"] else ""
    return f"{own} + {unit['recall']}" if unit["recall"] else own


# What tables begin with.
OF_CACHE: list[Column] = [("cache", lambda unit: str(unit["cache"])), ("rows (at most)", _rows)]


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Items by a key, in the order of their first ones."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def mean_of(values: Iterable[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def count_of(n: int, one: str, many: str) -> str:
    """So many of them, in words."""
    return f"{n} {one if n == 1 else many}"
