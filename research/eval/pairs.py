"""Pairs of keys and values, and several questions about them one after the other: our own task.

After Retr.KV of SCBench (Li et al. 2025) in its mode of many turns: a JSON object, then a question
for one key after the other in the same conversation, with the right answers to the questions before
in the text, so that a wrong answer spoils no later one. Differences: keys are words and values
numbers of seven digits, where SCBench has UUIDs for both, and the keys that are asked for lie in
equal parts of the object.
"""

from __future__ import annotations

import json
import random

from .niah import drawn
from .samples import Question, Sample
from .words import Prose

QUESTIONS = 5
LEAST = QUESTIONS
"""Pairs of the smallest object: one for each question."""

_CONTEXT = (
    "Below is a JSON object with keys and their values. Make sure to memorize it. I will quiz you "
    "about the values afterwards.\n{context}"
)
_QUESTION = "\nWhat is the value of the key {key} in the JSON object?"
_PREFIX = " The value of the key {key} is"


def build(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """A sample with `size` pairs; `tokens` and `prose` do not matter to it."""
    pairs = dict(zip(drawn("words", size, rng), drawn("numbers", size, rng), strict=True))
    keys = list(pairs)
    ends = [size * i // QUESTIONS for i in range(QUESTIONS + 1)]
    asked = [keys[rng.randrange(ends[i], ends[i + 1])] for i in range(QUESTIONS)]
    rng.shuffle(asked)
    questions = tuple(
        Question(
            _QUESTION.format(key=key),
            _PREFIX.format(key=key),
            (pairs[key],),
            places=(f'"{key}": "{pairs[key]}"',),
        )
        for key in asked
    )
    return Sample(_CONTEXT.format(context=json.dumps(pairs, indent=0)), questions)
