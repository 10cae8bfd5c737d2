"""Base class of quality measurements: requested units, measuring them, and their tables.

A measurement covers many caches and samples, each of which is a unit of its result file. Units in
the file are not measured again.
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
    """Return a policy or "full" as it is written everywhere, without default parameters."""
    return FULL if text == FULL else str(parse_policy(text))


@dataclass(frozen=True)
class CacheSettings:
    """The caches that are compared with the full one.

    Attributes:
        policies: such as "h2o" or "snap:queries=64", each as its `str`; "full" is the full cache.
        budgets: rows to keep: fractions of the text's tokens (float) or counts (int).
        recent_share: share of the rows that are not pinned.
        pinned: first positions that are never evicted; part of the budget.
        recalls: retrieved rows of the budget, a fraction or a count each; 0 is a cache without an
            archive, None the settings' default. The baseline of sinks and a window never retrieves
            rows.
    """

    policies: tuple[str, ...]
    budgets: tuple[Rows, ...]
    recent_share: float = 0.5
    pinned: int = 0
    recalls: tuple[Rows | None, ...] = (None,)

    def for_text(self, tokens: int) -> list[MeasuredCache]:
        """Return the full cache and all others for `tokens` tokens, in the order of the tables.

        Raises:
            SettingsError: a share is out of range, or a budget has no space for a row that is not
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
    """Settings of every measurement: a GGUF file, devices, caches."""

    model: Path
    compute: Compute
    caches: CacheSettings

    def options(self) -> dict[str, Any]:
        """Return the command's options that change the numbers of every unit."""
        return {}

    def basis(self) -> dict[str, Any]:
        """Return what the units of a file have in common, with names for users.

        Settings that only select units, such as budgets and texts, are not part of it: a later run
        can add some. A GPU rounds differently from the CPU, and so may other machines.

        Raises:
            ModelError: the model's file is missing or not a model.
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
    """A unit to measure: its cache, its input, and its name in the file.

    Jobs with the same `opening` can share an opened cache.
    """

    cache: MeasuredCache
    name: str
    what: Any
    opening: Hashable


T = TypeVar("T")
Q = TypeVar("Q", bound=Settings)


class Measurement(ABC, Generic[Q]):
    """A measurement, from its jobs to its tables.

    Attributes:
        kind: the name of its command.
        notes: explanations of the figures.
    """

    kind: ClassVar[str]

    def __init__(self, settings: Q, file: ResultFile) -> None:
        """Check the model and the settings; nothing is measured yet.

        Args:
            settings: of the measurement.
            file: where the results go.

        Raises:
            PyH2OError: the model or a setting is refused.
        """
        self.notes: tuple[str, ...] = ()
        self._settings = settings
        self._file = file

    @abstractmethod
    def wanted(self) -> list[Job]:
        """Return all units in the order of the tables."""

    @abstractmethod
    def opened(self, job: Job) -> Llama:
        """Return the cache of a job."""

    @abstractmethod
    def measured(self, llm: Llama, job: Job) -> Unit:
        """Return the figures of a unit."""

    @abstractmethod
    def tables(self) -> list[TextTable]:
        """Return the tables of all measured units; none if there are none."""

    def run(self) -> None:
        """Measure the units missing in the file.

        Raises:
            PyH2OError: a cache is refused, or memory or disk space is insufficient.
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
        """Open the model with a cache (see `open_llama`)."""
        settings = self._settings
        return open_llama(settings.model, cache, window=window, compute=settings.compute, **more)

    def _units(self) -> list[Unit]:
        """Return the measured units among the requested ones."""
        units = self._file.units
        return [units[job.name] for job in self.wanted() if job.name in units]


def told_of(cache: MeasuredCache, llm: Llama | None) -> Unit:
    """Return the description of a cache for all tables; no capacity without a model."""
    return {
        "cache": cache.name,
        "policy": cache.policy,
        "budget": cache.budget,
        "rows": cache.rows,
        "capacity": 0 if cache.is_full or llm is None else llm.kv.capacity,
        "recall": cache.recall,
    }


def _rows(unit: Unit) -> str:
    """Return cached rows, including the slack between two compactions, and retrieved rows."""
    own = f"{unit['rows'] - unit['recall']} ({unit['capacity']})" if unit["rows"] else ""
    return f"{own} + {unit['recall']}" if unit["recall"] else own


# The first columns of tables.
OF_CACHE: list[Column] = [("cache", lambda unit: str(unit["cache"])), ("rows (at most)", _rows)]


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Group items by a key, in the order of the first items."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that exist."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def count_of(n: int, one: str, many: str) -> str:
    """Return a count in words."""
    return f"{n} {one if n == 1 else many}"
