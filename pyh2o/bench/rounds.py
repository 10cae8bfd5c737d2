"""Interleaved rounds, so that drift of the machine's speed affects all variants equally.

Values of two variants in the same round can be compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def interleaved(variants: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield every variant once a round, in reversed order in every second round."""
    for number in range(rounds):
        yield from variants if number % 2 == 0 else reversed(variants)


@dataclass(frozen=True)
class Range:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], others: Sequence[float]) -> Range | None:
        """Summarise the ratios to another variant in the same round; None without any."""
        ratios = [own / other for own, other in zip(values, others, strict=False)]
        return cls.of(ratios) if ratios else None

    def __format__(self, form: str) -> str:
        """Return "median (low-high)", each formatted as a number."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"
