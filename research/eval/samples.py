"""A sample of a recall task, what counts as an answer, and the largest sample that fits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyh2o.errors import SettingsError


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Attributes:
        text: what is asked.
        prefix: what the answer begins with; the model goes on from there.
        references: what the answer has to have in it.
        places: pieces of the text that have the answer in them, each of which is there once; none
            where the answer is nowhere in particular.
        wrong: pattern, in any case, of what must not be given in the place of the answer; "" where
            anything but the answer is equally wrong.
        rival: a wrong answer of that kind, whose likelihood is compared with the right one's.
        kind: of what is asked for, where a text has questions of several kinds.
    """

    text: str
    prefix: str
    references: tuple[str, ...]
    places: tuple[str, ...] = ()
    wrong: str = ""
    rival: str = ""
    kind: str = ""

    @property
    def answer(self) -> str:
        """The right answer after the prefix, as its likelihood is measured."""
        return " " + ", ".join(self.references)

    def is_wrong(self, answer: str) -> bool:
        """Whether an answer gives what it must not, before anything that it has to have."""
        match = re.search(self.wrong, answer, re.IGNORECASE) if self.wrong else None
        return match is not None and not string_match_all(answer[: match.start()], self.references)

    def score(self, answer: str) -> float:
        """RULER's score of an answer; 0 for one that is wrong."""
        return 0.0 if self.is_wrong(answer) else string_match_all(answer, self.references)


@dataclass(frozen=True)
class Sample:
    """A text with something in it, and questions about that.

    Attributes:
        context: the text, with what is said before it.
        questions: asked one after the other in the same text, each behind the right answers to
            those before it.
        apart: each is asked behind the context alone instead.
    """

    context: str
    questions: tuple[Question, ...]
    apart: bool = False

    @property
    def longest(self) -> Sample:
        """The longest that is asked at once."""
        if not self.apart:
            return self
        asked = max(self.questions, key=lambda one: len(one.text + one.prefix + one.answer))
        return replace(self, questions=(asked,))


# A sample with a haystack of so many units; the same random numbers give the same needles.
Build = Callable[[int, random.Random], Sample]


def largest_sample(
    build: Build, seed: str, fits: Callable[[Sample], bool], *, least: int, otherwise: str
) -> Sample:
    """The sample with the largest haystack that fits, by binary search as in RULER.

    RULER searches once for a task and then takes a few units from samples that turn out too long;
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
    """Share of the references in an answer, upper and lower case being equal (RULER's score)."""
    found = [reference.lower() in answer.lower() for reference in references]
    return sum(found) / len(found)
