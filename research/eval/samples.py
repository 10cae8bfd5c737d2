"""Samples of recall tasks, scoring of answers, and the largest sample that fits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyh2o.errors import SettingsError


@dataclass(frozen=True)
class Sample:
    """A text with a hidden fact, and a question about it.

    Attributes:
        context: the text, with its introduction.
        question: asked about it.
        prefix: start of the answer, which the model continues.
        references: strings that the answer must contain.
        places: pieces of the text with the answer, each of which occurs once; none if the answer
            has no particular place.
    """

    context: str
    question: str
    prefix: str
    references: tuple[str, ...]
    places: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The right answer after the prefix, whose likelihood is measured."""
        return " " + ", ".join(self.references)

    def after(self, shown: Sample, separator: str) -> Sample:
        """Return this sample after another, answered one as an example."""
        answered = f"{shown.context}{shown.question}{shown.prefix} {' '.join(shown.references)}"
        return replace(self, context=f"{answered}{separator}{self.context}")


# A sample with a haystack of this many units; the same random numbers give the same needles.
Build = Callable[[int, random.Random], Sample]


def largest_sample(
    build: Build, seed: str, fits: Callable[[Sample], bool], *, least: int, otherwise: str
) -> Sample:
    """Return the sample with the largest haystack that fits, by binary search as in RULER.

    RULER searches once per task and then takes a few units from samples that turn out too long;
    here every sample has its own search.

    Args:
        build: makes a sample of a size.
        seed: of its random numbers.
        fits: whether a sample is short enough.
        least: smallest size.
        otherwise: the error if even that does not fit.

    Raises:
        SettingsError: see `otherwise`.
    """

    def of(size: int) -> Sample:
        return build(size, random.Random(seed))

    if not fits(of(least)):
        raise SettingsError(otherwise)
    low, high = least, 2 * least + 1
    while fits(of(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(of(middle)):
            low = middle
        else:
            high = middle
    return of(low)


def string_match_all(answer: str, references: tuple[str, ...]) -> float:
    """Return the share of the references in an answer, ignoring case (RULER's score)."""
    found = [reference.lower() in answer.lower() for reference in references]
    return sum(found) / len(found)
