"""Variable tracking: RULER's task of following assignments through a text.

After NVIDIA/RULER, `scripts/data/synthetic/variable_tracking.py`, with one chain of four hops.
"""

from __future__ import annotations

import random
from itertools import pairwise
from string import ascii_uppercase

from .niah import NOISE
from .samples import Sample
from .words import Prose

HOPS = 4
# Lines of noise in the worked example, which has at most 500 tokens in RULER.
EXAMPLE_LINES = 5
EXAMPLE_LETTERS = 3
LETTERS = 5

_CONTEXT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following "
    "text.\n\n{context}"
)
_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {query}, they are:"
)

LEAST = HOPS + 1
"""Lines of noise in the smallest haystack: one for each assignment."""


def build(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """Return a sample with a worked example before it; `tokens` and `prose` are unused."""
    example = _sample(EXAMPLE_LINES, EXAMPLE_LETTERS, rng)
    return _sample(size, LETTERS, rng).after(example, "\n\n\n")


def _sample(n_lines: int, letters: int, rng: random.Random) -> Sample:
    names = _names(HOPS + 1, letters, rng)
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    lines = [NOISE] * n_lines
    places = sorted(rng.sample(range(n_lines), len(chain)))
    for moved, (place, statement) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + moved, statement)
    return Sample(
        _CONTEXT.format(context="\n".join(lines)),
        _QUESTION.format(query=value),
        _PREFIX.format(count=len(names), query=value),
        tuple(names),
        places=tuple(chain),
    )


def _names(count: int, letters: int, rng: random.Random) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(ascii_uppercase, k=letters))] = None
    return list(names)
