"""Random numbers of a test: a seed and, in a loop, the case, both printed when it fails."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

Case = TypeVar("Case")


class Cases(Protocol):
    """The type of the fixture `cases`."""

    def __call__(self, of: Sequence[Case]) -> Iterator[tuple[Case, np.random.Generator]]: ...


class Randomness:
    """Random numbers of one test, the same in every run unless PYH2O_TEST_SEED is set."""

    def __init__(self, test: str) -> None:
        wanted = os.environ.get("PYH2O_TEST_SEED")
        if wanted == "random":
            self.seed = secrets.randbelow(2**32)
        else:
            self.seed = int(wanted or zlib.crc32(test.encode()))
        self.case: object = None

    def cases(self, of: Sequence[Case]) -> Iterator[tuple[Case, np.random.Generator]]:
        """Yield cases, each with its own random numbers."""
        for number, self.case in enumerate(of):
            yield of[number], np.random.default_rng([self.seed, number])
        self.case = None

    def __str__(self) -> str:
        """Return how to repeat the test."""
        case = "" if self.case is None else f"case {self.case}; "
        return f"{case}repeat it with PYH2O_TEST_SEED={self.seed}"
