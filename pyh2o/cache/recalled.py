"""Evicted passages that received most attention through recall, as readable text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..core.text import Text
    from .kv_cache import WeightArray

MAX_PASSAGES = 8
# Tokens of a passage around a peak of attention.
AROUND_PEAK = 48
# Tokens to smooth over before looking for peaks: heads attend to different tokens of a word.
PEAK = 16
# Maximum number of tokens to extend each end of a passage by, to whole words.
MAX_OF_A_WORD = 16


@dataclass(frozen=True)
class RecalledSpan:
    """An evicted passage that tokens have attended to in the archive.

    Attributes:
        start, end: positions, end not included.
        text: without special tokens.
        weight: sum of the squared attention weights, over query heads and attending tokens.
    """

    start: int
    end: int
    text: str
    weight: float


def passages(text: Text) -> list[RecalledSpan]:
    """Return the most attended passages since the start of the last prompt, in text order."""
    n_tokens = text.n_tokens
    weights = text.cache.found(n_tokens)
    found: list[RecalledSpan] = []
    for start, end in spans_around_peaks(weights):
        first, last = max(0, start - MAX_OF_A_WORD), min(n_tokens, end + MAX_OF_A_WORD)
        pieces = [text.model.detokenize([token]) for token in text.tokens[first:last].tolist()]
        start, end = (first + at for at in whole_words(pieces, start - first, end - first))
        if found and start < found[-1].end:  # of the same word
            start = found[-1].end
        words = b"".join(pieces[start - first : end - first]).decode("utf-8", errors="replace")
        if words.strip():
            found.append(RecalledSpan(start, end, words.strip(), float(weights[start:end].sum())))
    return found


def spans_around_peaks(weights: WeightArray) -> list[tuple[int, int]]:
    """Return the spans around the highest peaks of the weights, ascending and merged."""
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    at = np.arange(len(weights))
    smooth = sums[np.minimum(at + PEAK // 2, len(weights))] - sums[np.maximum(at - PEAK // 2, 0)]
    spans: list[tuple[int, int]] = []
    for _ in range(MAX_PASSAGES):
        peak = int(smooth.argmax()) if smooth.size else 0
        if not smooth.size or smooth[peak] <= 0:
            break
        start, end = max(0, peak - AROUND_PEAK // 2), min(len(weights), peak + AROUND_PEAK // 2)
        smooth[start:end] = 0
        spans.append((start, end))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            start = merged.pop()[0]  # all spans have the same length, so this one ends later
        merged.append((start, end))
    return merged


def whole_words(pieces: Sequence[bytes], start: int, end: int) -> tuple[int, int]:
    """Extend a span of tokens to whole words.

    Args:
        pieces: the text of each token, empty for special tokens.
        start, end: indices of the span in `pieces`.
    """

    def is_between_words(at: int) -> bool:
        if not 0 < at < len(pieces):
            return True
        before, after = pieces[at - 1], pieces[at]
        return not before or not after or before[-1:].isspace() or after[:1].isspace()

    while not is_between_words(start):
        start -= 1
    while not is_between_words(end):
        end += 1
    return start, end
