"""Numbers asked for in turn, that change later, or that are not there: tasks of our own.

All are hidden in prose as in RULER's niah_multikey_1 (see niah.py).

* turns: one key after the other is asked for.
* updated: every number is changed later in the text; the newer one counts.
* present, absent: the model is told to say so if the text has no number for a key. In one task
  there is one, in the other there is none. A model that always refuses fails in the first, one that
  always has a number in the second.
"""

from __future__ import annotations

import random

from .niah import drawn, in_prose, needle, stated
from .samples import Question, Sample
from .words import Prose

KEYS = 4
LEAST = 2 * KEYS
"""Words of the smallest haystack: one for each needle."""

_CONTEXT = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n{context}"
)
_CHANGE = "{key} has been changed. It is now: {value}"
_UPDATED_QUESTION = (
    "\nWhat is the special magic number for {key} after all changes mentioned in the provided text?"
)
_UPDATED_PREFIX = " The special magic number for {key} is now"

REFUSAL = "not mentioned"
# Whatever has so many digits is taken for an answer, in the text or not.
NUMBER = r"\d{4}"
_QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? If there is no "
    "number for it, say that it is not mentioned."
)
_PREFIX = " The special magic number for {key} is"
_TURN_QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"


def build_turns(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """A sample with `size` words of prose; `tokens` do not matter to it."""
    keys, values = drawn("words", KEYS, rng), drawn("numbers", KEYS, rng)
    questions = tuple(
        Question(
            _TURN_QUESTION.format(key=key),
            _PREFIX.format(key=key),
            (value,),
            places=(stated(key, value),),
        )
        for key, value in zip(keys, values, strict=True)
    )
    return _sample(size, _needles(keys, values, rng), questions, rng, prose)


def build_updated(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """As `build_turns`, with two numbers for each key and one question."""
    keys, values = drawn("words", KEYS, rng), drawn("numbers", 2 * KEYS, rng)
    old = dict(zip(keys, values[:KEYS], strict=True))
    new = dict(zip(keys, values[KEYS:], strict=True))
    changes = {key: _CHANGE.format(key=key, value=new[key]) for key in rng.sample(keys, KEYS)}
    hidden = [needle("numbers", *item) for item in old.items()]
    hidden += [f"The special magic number for {change}." for change in changes.values()]
    key = rng.choice(keys)
    question = Question(
        _UPDATED_QUESTION.format(key=key),
        _UPDATED_PREFIX.format(key=key),
        (new[key],),
        places=(changes[key],),
        wrong=old[key],
        rival=f" {old[key]}",
    )
    return _sample(size, hidden, (question,), rng, prose)


def build_present(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """As `build_turns`, with one question for a key that has a number."""
    keys, values = drawn("words", KEYS, rng), drawn("numbers", KEYS, rng)
    key, value = keys[0], values[0]
    question = Question(
        _QUESTION.format(key=key),
        _PREFIX.format(key=key),
        (value,),
        places=(stated(key, value),),
        wrong=REFUSAL,
        rival=f" {REFUSAL}",
    )
    return _sample(size, _needles(keys, values, rng), (question,), rng, prose)


def build_absent(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """As `build_turns`, with one question for a key that has none; the rival is another one's."""
    key, *keys = drawn("words", KEYS + 1, rng)
    values = drawn("numbers", KEYS, rng)
    question = Question(
        _QUESTION.format(key=key),
        _PREFIX.format(key=key),
        (REFUSAL,),
        wrong=NUMBER,
        rival=f" {values[0]}",
    )
    return _sample(size, _needles(keys, values, rng), (question,), rng, prose)


def _needles(keys: list[str], values: list[str], rng: random.Random) -> list[str]:
    needles = [needle("numbers", key, value) for key, value in zip(keys, values, strict=True)]
    rng.shuffle(needles)
    return needles


def _sample(
    size: int, hidden: list[str], asked: tuple[Question, ...], rng: random.Random, prose: Prose
) -> Sample:
    text = in_prose(" ".join(prose.words(size)), hidden, rng)
    return Sample(_CONTEXT.format(context=text), asked)
