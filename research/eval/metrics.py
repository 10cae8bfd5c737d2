"""Metrics of predictions and texts, computed without a model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# Neighbouring positions share earlier evictions, so their losses are not independent: the error
# of a mean is computed from the means of blocks of this many neighbours.
BLOCK = 32

# Self-BLEU: longest n-grams, and the value for no match (Chen and Cherry 2014, smoothing
# method 1; the same number as in NLTK's `SmoothingFunction.method1`).
LONGEST_NGRAM = 4
NO_MATCH = 0.1


# -------------------------------------------------------------------------------------------------
# Predictions
# -------------------------------------------------------------------------------------------------


def log_softmax(logits: npt.NDArray[np.float32]) -> FloatArray:
    """Return log-probabilities [n, n_vocab] of logits of the same shape, as a new array."""
    shifted: FloatArray = logits - logits.max(axis=1, keepdims=True)
    totals = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    shifted -= np.log(totals).astype(np.float32)
    return shifted


def surprises(log_probs: FloatArray, expected: Sequence[int] | npt.NDArray[np.int64]) -> FloatArray:
    """Return [n] negative log-likelihoods of the next tokens from log_probs [n, n_vocab]."""
    losses: FloatArray = -log_probs[np.arange(len(expected)), np.asarray(expected)]
    return losses


def divergence(full: FloatArray, other: FloatArray) -> FloatArray:
    """Return KL(full || other) in nats at each position.

    Args:
        full, other: [n, n_vocab] log-probabilities. Those of `full` may be rounded: they are
            normalised again, so that equal predictions have a divergence of 0.

    Returns:
        [n], never negative.
    """
    full = log_softmax(full)
    kl = (np.exp(full) * (full - other)).sum(axis=1, dtype=np.float64)
    not_negative: FloatArray = np.maximum(kl, 0.0).astype(np.float32)
    return not_negative


def perplexity(nll: npt.NDArray[np.floating]) -> float:
    """Return the perplexity of one or more negative log-likelihoods."""
    return math.exp(float(np.mean(nll, dtype=np.float64)))


def mean_and_error(values: npt.NDArray[np.floating], block: int = 1) -> tuple[float, float | None]:
    """Return the mean of values and its standard error.

    Args:
        values: [n], in the order of the text.
        block: number of neighbours that are averaged first; the error ignores an incomplete block
            at the end.

    Returns:
        The error is None if there are fewer than two blocks.
    """
    values = np.asarray(values, dtype=np.float64)
    n_blocks = len(values) // block
    mean = float(values.mean())
    if n_blocks < 2:
        return mean, None
    means = values[: n_blocks * block].reshape(n_blocks, block).mean(axis=1)
    return mean, float(means.std(ddof=1) / math.sqrt(n_blocks))


def difference(
    values: npt.NDArray[np.floating],
    reference: npt.NDArray[np.floating] | None,
    block: int = 1,
) -> tuple[float, float | None] | tuple[None, None]:
    """Return the mean difference to a reference and its error (see `mean_and_error`)."""
    if reference is None:
        return None, None
    return mean_and_error(values.astype(np.float64) - reference, block)


def perplexities(nll: FloatArray, first: int, size: int) -> tuple[float | None, ...]:
    """Return perplexities of the tokens [0, size), [size, 2 * size) ... of a text that count.

    Args:
        nll: [n] of tokens 1 .. n.
        first: first token that counts.
        size: tokens of a part.
    """
    parts = [
        nll[max(start, first) - 1 : start + size - 1] for start in range(0, len(nll) + 1, size)
    ]
    return tuple(perplexity(part) if part.size else None for part in parts)


def gap_closed(full: float, baseline: float, value: float) -> float | None:
    """Return the closed share of the gap between the baseline's perplexity and the full cache's.

    Returns:
        1 if equal to the full cache, 0 for the baseline, negative if worse; None if the baseline
        loses nothing.
    """
    gap = baseline - full
    return (baseline - value) / gap if gap > 0 else None


def share_within(
    places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], before: int
) -> float | None:
    """Return the share of places in a text that spans cover completely.

    Args:
        places, spans: first position and the one after the last.
        before: places that end after this position do not count.

    Returns:
        None if no place counts.
    """
    counting = [place for place in places if place[1] <= before]
    covered = {position for a, b in spans for position in range(a, b)}
    within = [covered.issuperset(range(*place)) for place in counting]
    return sum(within) / len(within) if within else None


# -------------------------------------------------------------------------------------------------
# Texts
# -------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Return words and punctuation marks in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def ngrams(items: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    """Return all runs of n neighbours."""
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]


def distinct(items: Sequence[Hashable], n: int) -> float | None:
    """Distinct-n (Li et al. 2016): distinct n-grams divided by all n-grams, or None without any.

    It falls with the length of a text: compare texts of one length.
    """
    runs = ngrams(items, n)
    return len(set(runs)) / len(runs) if runs else None


def repeated(items: Sequence[Hashable], n: int) -> float | None:
    """Return the share of n-grams that occurred before (seq-rep-n of Welleck et al. 2020).

    repetition.py detects something else: a loop, in which all tokens repeat.
    """
    share = distinct(items, n)
    return None if share is None else 1 - share


def bleu(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU of one text against several (Papineni et al. 2002), 0 to 1.

    The geometric mean of the clipped precisions of 1- to 4-grams, times the brevity penalty for the
    reference that is nearest in length (the shorter of two). A precision without matches counts as
    `NO_MATCH` of one n-gram.
    """
    if not candidate:
        return 0.0
    logs = []
    for n in range(1, LONGEST_NGRAM + 1):
        own = Counter(ngrams(candidate, n))
        most: Counter[tuple[Hashable, ...]] = Counter()
        for reference in references:
            most |= Counter(ngrams(reference, n))
        matches = sum(min(count, most[run]) for run, count in own.items())
        logs.append(math.log((matches or NO_MATCH) / max(1, sum(own.values()))))
    size = len(candidate)
    nearest = min((abs(len(one) - size), len(one)) for one in references)[1]
    penalty = 1.0 if size > nearest else math.exp(1 - nearest / size)
    return penalty * math.exp(sum(logs) / len(logs))


def self_bleu(texts: Sequence[Sequence[str]]) -> float | None:
    """Self-BLEU (Zhu et al. 2018, Texygen): the mean BLEU of each text against all others.

    1 if all texts are equal; lower values mean more diversity. None for fewer than two.
    """
    if len(texts) < 2:
        return None
    scores = [
        bleu(text, [other for j, other in enumerate(texts) if j != i])
        for i, text in enumerate(texts)
    ]
    return sum(scores) / len(scores)
