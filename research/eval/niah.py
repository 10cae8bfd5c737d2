"""Needles in a haystack: RULER's eight tasks of that kind.

After NVIDIA/RULER (Hsieh et al. 2024), `scripts/data/synthetic/niah.py` and
`scripts/synthetic.yaml`. Differences: the words are our own (see words.py), and so is the prose if
no text is given; it is split into sentences after `.`, `!` and `?`, where RULER uses NLTK.
"""

from __future__ import annotations

import random
import re
import uuid
from dataclasses import dataclass
from typing import Literal

from .samples import Sample
from .words import Prose, key_words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DIGITS = 7
# Depths of needles in prose, in percent.
DEPTHS = [round(100 * i / 39) for i in range(40)]

Kind = Literal["words", "numbers", "uuids"]

_TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n{context}",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)
_TEMPLATE_OF_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will "
    "quiz you about the {kind} afterwards.\n{context}",
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)


@dataclass(frozen=True)
class Needles:
    """The hidden needles and their haystack.

    Attributes:
        haystack: "noise" repeats five sentences, "prose" is a text, "needles" are other needles of
            the same form; a unit of it is the noise, a word or a needle.
        keys, values: kinds of a needle's two parts.
        n_keys, n_values, n_queries: keys, values of each, and keys that are asked for.
    """

    haystack: Literal["noise", "prose", "needles"]
    keys: Kind = "words"
    values: Kind = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1

    @property
    def least(self) -> int:
        """Return the units of the smallest haystack."""
        return self.n_keys * self.n_values

    def build(self, size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
        """Return a sample; `tokens` is unused."""
        keys = _drawn(self.keys, self.n_keys, rng)
        values = _drawn(self.values, self.n_keys * self.n_values, rng)
        of_key = {
            key: values[i * self.n_values : (i + 1) * self.n_values] for i, key in enumerate(keys)
        }
        needles = [_needle(self.values, key, value) for key in keys for value in of_key[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.n_queries)
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        references = tuple(value for key in asked for value in of_key[key])
        if self.haystack == "noise":
            context = _among_lines([NOISE] * size, needles, rng)
        elif self.haystack == "needles":
            # Generated after the needles, so that these are the same in a haystack of any size.
            context = _among_lines(self._distractors(size, rng, {*keys}, {*values}), needles, rng)
        else:
            context = _in_prose(" ".join(prose.words(size)), needles, rng)
        is_one = len(references) == 1
        kind = self.values.removesuffix("s") if is_one else self.values
        parts = _TEMPLATE_OF_ONE if is_one else _TEMPLATE
        texts = [part.format(kind=kind, query=query, context=context) for part in parts]
        places = tuple(_stated(key, value) for key in asked for value in of_key[key])
        return Sample(texts[0], texts[1], texts[2], references, places)

    def _distractors(
        self, size: int, rng: random.Random, keys: set[str], values: set[str]
    ) -> list[str]:
        """Return needles that are not asked for, with other keys and values."""
        own_keys = [key for key in _drawn(self.keys, size + len(keys), rng) if key not in keys]
        own_values = _drawn(self.values, size + len(values), rng)
        own_values = [value for value in own_values if value not in values]
        return [
            _needle(self.values, key, value)
            for key, value in zip(own_keys[:size], own_values[:size], strict=True)
        ]


def _needle(kind: Kind, key: str, value: str) -> str:
    """Return a hidden sentence."""
    return f"One of the special magic {kind} for {_stated(key, value)}."


def _stated(key: str, value: str) -> str:
    """Return the part of that sentence with the answer."""
    return f"{key} is: {value}"


def _drawn(kind: Kind, count: int, rng: random.Random) -> list[str]:
    """Return `n` distinct values."""
    if kind == "words":
        return key_words(rng, count)
    if kind == "numbers":
        numbers: dict[str, None] = {}
        while len(numbers) < count:
            numbers[str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))] = None
        return list(numbers)
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def _among_lines(lines: list[str], needles: list[str], rng: random.Random) -> str:
    """Insert every needle before a random other line."""
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    lines = list(lines)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _in_prose(text: str, needles: list[str], rng: random.Random) -> str:
    """Insert every needle between two sentences at random depths of `DEPTHS`; their order stays."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
    parts: list[str] = []
    start = 0
    for place, needle in zip(places, needles, strict=True):
        parts += [*sentences[start:place], needle]
        start = place
    return " ".join([*parts, *sentences[start:]])
