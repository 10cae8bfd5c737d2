"""What is computed from predictions and texts, without any model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# Neighbouring positions share what was evicted before them, so their losses are not independent:
# the error of a mean is taken from the means of so many neighbours.
BLOCK = 32

# Self-BLEU: longest n-grams, and what stands for no match at all (Chen and Cherry 2014, smoothing
# method 1; NLTK's `SmoothingFunction.method1` has the same number).
LONGEST_NGRAM = 4
NO_MATCH = 0.1


# -------------------------------------------------------------------------------------------------
# Predictions
# -------------------------------------------------------------------------------------------------


def log_softmax(logits: npt.NDArray[np.float32]) -> FloatArray:
    """Log-probabilities [n, n_vocab] of logits of the same shape; a new array."""
    shifted: FloatArray = logits - logits.max(axis=1, keepdims=True)
    totals = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    shifted -= np.log(totals).astype(np.float32)
    return shifted


def surprises(log_probs: FloatArray, expected: Sequence[int] | npt.NDArray[np.int64]) -> FloatArray:
    """[n] negative log-likelihood of the tokens that came, of log-probabilities [n, n_vocab]."""
    losses: FloatArray = -log_probs[np.arange(len(expected)), np.asarray(expected)]
    return losses


def divergence(full: FloatArray, other: FloatArray) -> FloatArray:
    """KL(full || other) in nats at each position.

    Args:
        full, other: [n, n_vocab] log-probabilities. Those of `full` may be rounded: they are made
            to add up to 1 again, so that equal predictions have a divergence of 0.

    Returns:
        [n], never negative.
    """
    full = log_softmax(full)
    kl = (np.exp(full) * (full - other)).sum(axis=1, dtype=np.float64)
    not_negative: FloatArray = np.maximum(kl, 0.0).astype(np.float32)
    return not_negative


def perplexity(nll: npt.NDArray[np.floating]) -> float:
    """Of the negative log-likelihoods of some tokens; at least one."""
    return math.exp(float(np.mean(nll, dtype=np.float64)))


def mean_and_error(values: npt.NDArray[np.floating], block: int = 1) -> tuple[float, float | None]:
    """The mean of values and its standard error.

    Args:
        values: [n], in the order of the text.
        block: as many neighbours are averaged before their spread is taken; what is left at the
            end is not counted in the error.

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
    """The mean difference to a reference, one by one, and its error (see `mean_and_error`)."""
    if reference is None:
        return None, None
    return mean_and_error(values.astype(np.float64) - reference, block)


def perplexities(nll: FloatArray, first: int, size: int) -> tuple[float | None, ...]:
    """Of the tokens [0, size), [size, 2 * size) ... of a text, as far as they count.

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
    """How much of the way from the baseline's perplexity to the full cache's a cache has come.

    Returns:
        1 for as good as the full cache, 0 for the baseline, negative for worse than that; None
        where the baseline loses nothing.
    """
    gap = baseline - full
    return (baseline - value) / gap if gap > 0 else None


def share_within(
    places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], before: int
) -> float | None:
    """Share of the places in a text that some spans cover as a whole.

    Args:
        places, spans: first position and the one behind the last.
        before: places that end behind this position do not count.

    Returns:
        None if none counts.
    """
    counting = [place for place in places if place[1] <= before]
    covered = {position for a, b in spans for position in range(a, b)}
    within = [covered.issuperset(range(*place)) for place in counting]
    return sum(within) / len(within) if within else None


# -------------------------------------------------------------------------------------------------
# Texts
# -------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Words and punctuation marks in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def ngrams(items: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    """All runs of n neighbours."""
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]


def distinct(items: Sequence[Hashable], n: int) -> float | None:
    """Distinct-n (Li et al. 2016): different n-grams over all n-grams; None where there are none.

    The longer a text, the lower it is: compare texts of one length.
    """
    runs = ngrams(items, n)
    return len(set(runs)) / len(runs) if runs else None


def repeated(items: Sequence[Hashable], n: int) -> float | None:
    """Share of n-grams that have been there before (seq-rep-n of Welleck et al. 2020).

    What repetition.py looks for is something else: a loop, in which all tokens repeat.
    """
    share = distinct(items, n)
    return None if share is None else 1 - share


def bleu(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """BLEU of one text against several (Papineni et al. 2002), 0 to 1.

    The geometric mean of the clipped precisions of 1- to 4-grams, times the brevity penalty for
    the reference that is nearest in length (the shorter of two). A precision without any match
    counts as `NO_MATCH` of one n-gram.
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

    1 where all texts are the same: the lower it is, the more they differ. None for fewer than two.
    """
    if len(texts) < 2:
        return None
    scores = [
        bleu(text, [other for j, other in enumerate(texts) if j != i])
        for i, text in enumerate(texts)
    ]
    return sum(scores) / len(scores)
