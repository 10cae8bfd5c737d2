"""Common and frequent words: RULER's two tasks of counting over a whole text.

After NVIDIA/RULER, `scripts/data/synthetic/common_words_extraction.py` and
`freq_words_extraction.py`. Of all tasks, these depend most on which tokens are kept.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from string import ascii_lowercase

from pyh2o.errors import SettingsError

from .samples import Sample
from .words import Prose, single_words

COMMON = 10
# Below this length RULER repeats words less often.
SHORT = 4096

_COMMON_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}"
)
_COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

COMMON_LEAST = COMMON + 1

# Exponent of the zeta distribution, and its normaliser zeta(2).
ALPHA = 2.0
ZETA = math.pi**2 / 6
# RULER's vocabulary has a word per this many tokens, and the text grows by that share of them.
TOKENS_PER_WORD = 50
STEPS = 32
FREQUENT = 3
LETTERS = 6
NOISE_WORD = "..."

_FREQUENT_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}"
)
_FREQUENT_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
_FREQUENT_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)


def build_common(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """Return a list of `size` words, ten of them more frequent, after a short example with its
    answer.

    Raises:
        SettingsError: more words than there are.
    """
    pool = single_words(rng)
    is_short = tokens < SHORT
    n_example = 20 if is_short else 40
    if n_example + size > len(pool):
        raise SettingsError(f"cwe has no {size} different words: give fewer --tokens")
    example = _common(pool[:n_example], *((3, 1) if is_short else (10, 3)), rng)
    words = pool[n_example : n_example + size]
    asked = _common(words, *((6, 1) if is_short else (30, 3)), rng)
    return asked.after(replace(example, references=(_numbered(example.references),)), "\n")


def _common(words: list[str], often: int, seldom: int, rng: random.Random) -> Sample:
    """The first words of the list are the common ones."""
    listed = words[:COMMON] * often + words[COMMON:] * seldom
    rng.shuffle(listed)
    context = _COMMON_CONTEXT.format(context=_numbered(listed))
    return Sample(context, _COMMON_QUESTION, _COMMON_PREFIX, tuple(words[:COMMON]))


def _numbered(words: list[str] | tuple[str, ...]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def frequent_least(tokens: int) -> int:
    """Return the units of the shortest text whose third word is more frequent than its fourth."""
    size = 1
    while not _is_clear(_counts(size, tokens)):
        size += 1
    return size


def build_frequent(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """Return coded words in random order with counts from a zeta distribution; the first is noise.

    Args:
        size: units of tokens / 32 words.
        tokens: maximum length of the sample.
        rng: random numbers.
        prose: unused.
    """
    counts = _counts(size, tokens)
    words: dict[str, None] = {NOISE_WORD: None}
    while len(words) < len(counts):
        words["".join(rng.choices(ascii_lowercase, k=LETTERS))] = None
    vocabulary = list(words)
    coded = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(coded)
    frequent = tuple(vocabulary[1 : 1 + FREQUENT])
    context = _FREQUENT_CONTEXT.format(context=" ".join(coded))
    return Sample(context, _FREQUENT_QUESTION, _FREQUENT_PREFIX, frequent)


def _counts(size: int, tokens: int) -> list[int]:
    """Return how often the word of each rank occurs."""
    n_words = size * max(1, tokens // STEPS)
    n_ranks = max(FREQUENT + 2, tokens // TOKENS_PER_WORD)
    return [int(n_words * rank**-ALPHA / ZETA) for rank in range(1, n_ranks + 1)]


def _is_clear(counts: list[int]) -> bool:
    """Return whether the answers occur more often than all other words except the noise."""
    return counts[FREQUENT] > counts[FREQUENT + 1]
