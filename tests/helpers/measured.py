"""What the tests of measurements share: files of results, texts, and what is said meanwhile."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

from research.eval.measurement import CacheSettings
from research.eval.results import ResultFile

TRAINED = 1024
"""Tokens that the tiny model of these tests was trained on."""

CACHES = CacheSettings(("h2o", "streaming"), (0.25, 100), recent_share=0.5)


class Quiet:
    """Takes down what it is told."""

    def __init__(self) -> None:
        self.planned = 0
        self.done = 0
        self.notes: list[str] = []

    def plan(self, total: int) -> None:
        self.planned = total

    def advance(self, label: str, amount: int) -> None:
        assert label
        self.done += amount

    def extra(self, label: str, done: int, total: int) -> None:
        assert 0 < done <= total

    def note(self, text: str) -> None:
        self.notes.append(text)


def random_text(rng: np.random.Generator, n: int) -> str:
    return "".join(rng.choice([*ascii_lowercase, " "], size=n).tolist())


def results(path: Path | None = None, kind: str = "x", *, with_arrays: bool = False) -> ResultFile:
    return ResultFile(path, kind, {"--seed": 1}, {"cpu": "a"}, with_arrays=with_arrays)


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key != "seconds"}
    return [without_times(one) for one in value] if isinstance(value, list) else value
