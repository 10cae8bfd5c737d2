"""The recall tasks by name: those of RULER that need no corpus."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pyh2o.errors import SettingsError

from . import counting, tracing
from .niah import Needles
from .samples import Sample, largest_sample
from .words import Prose

# Size, maximum tokens, random numbers, prose.
Build = Callable[[int, int, random.Random, Prose], Sample]


@dataclass(frozen=True)
class Task:
    """How samples of a task are made and answered.

    Attributes:
        name: RULER's.
        answer_tokens: maximum length of an answer.
        build: makes a sample from its size, its maximum tokens, random numbers and prose.
        least: size of the smallest sample of `n` tokens.
        needs_prose: whether it hides something in prose.
    """

    name: str
    answer_tokens: int
    build: Build
    least: Callable[[int], int]
    needs_prose: bool = False

    def sample(
        self, index: int, tokens: int, seed: int, prose: Prose, fits: Callable[[Sample], bool]
    ) -> Sample:
        """Return the longest sample of this number that fits.

        Args:
            index: number of the sample, from 0.
            tokens: maximum length of the sample with its answer.
            seed: of all samples.
            prose: to hide something in.
            fits: whether a sample is short enough.

        Raises:
            SettingsError: even the shortest sample is too long.
        """
        return largest_sample(
            lambda size, rng: self.build(size, tokens, rng, prose),
            f"{seed} {self.name} {tokens} {index}",
            fits,
            least=self.least(tokens),
            otherwise=f"--tokens {tokens} is too short for a sample of {self.name}: raise it",
        )


def _niah(name: str, needles: Needles) -> Task:
    return Task(
        name,
        128,
        needles.build,
        lambda tokens: needles.least,
        needs_prose=needles.haystack == "prose",
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _niah("niah_single_1", Needles("noise")),
        _niah("niah_single_2", Needles("prose")),
        _niah("niah_single_3", Needles("prose", values="uuids")),
        _niah("niah_multikey_1", Needles("prose", n_keys=4)),
        _niah("niah_multikey_2", Needles("needles")),
        _niah("niah_multikey_3", Needles("needles", keys="uuids", values="uuids")),
        _niah("niah_multivalue", Needles("prose", n_values=4)),
        _niah("niah_multiquery", Needles("prose", n_keys=4, n_queries=4)),
        Task("vt", 30, tracing.build, lambda tokens: tracing.LEAST),
        Task("cwe", 120, counting.build_common, lambda tokens: counting.COMMON_LEAST),
        Task("fwe", 50, counting.build_frequent, counting.frequent_least),
    )
}


def task_named(name: str) -> Task:
    """Return a task by name.

    Raises:
        SettingsError: unknown task.
    """
    if name not in TASKS:
        raise SettingsError(f"unknown task {name!r}: give one of {', '.join(TASKS)}")
    return TASKS[name]
