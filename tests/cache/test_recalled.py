"""Passages of a text that were retrieved most, as shown to users."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pyh2o.cache.recalled import (
    AROUND_PEAK,
    MAX_PASSAGES,
    RecalledSpan,
    passages,
    spans_around_peaks,
    whole_words,
)


class FakeText:
    """A text of tokens with a piece of text each, and retrieval weights."""

    def __init__(self, pieces: Sequence[str | bytes], weights: dict[int, float]) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.n_tokens = len(pieces)
        self.tokens = np.arange(self.n_tokens)
        self.weights = np.zeros(self.n_tokens)
        for position, weight in weights.items():
            self.weights[position] = weight

    def passages(self) -> list[RecalledSpan]:
        return passages(self.weights, self.tokens, self.detokenize)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)


def words(n: int) -> list[str]:
    """Return words of three tokens each: " ab1c"."""
    return [piece for i in range(n) for piece in (" a", f"b{i}", "c")]


def test_no_retrieved_rows_give_no_passages() -> None:
    assert FakeText([], {}).passages() == []
    assert FakeText(words(50), {}).passages() == []


def test_a_passage_has_whole_words_around_its_peak() -> None:
    text = FakeText(words(100), {151: 2.0, 154: 0.5})
    (span,) = text.passages()
    assert span.weight == 2.5
    assert "ab50c" in span.text
    assert span.text == text.detokenize(range(span.start, span.end)).decode().strip()
    assert all(word.startswith("ab") and word.endswith("c") for word in span.text.split())
    assert AROUND_PEAK <= span.end - span.start < AROUND_PEAK + 6


def test_the_strongest_passages_are_shown_in_text_order() -> None:
    peaks = {300 * i + 100: float(1 + i % 7) for i in range(12)}
    found = FakeText(words(1500), peaks).passages()
    assert len(found) == MAX_PASSAGES
    assert [span.start for span in found] == sorted(span.start for span in found)
    strongest = sorted(peaks.values(), reverse=True)[:MAX_PASSAGES]
    assert sorted((span.weight for span in found), reverse=True) == strongest


def test_many_adjacent_small_weights_form_a_peak() -> None:
    weights = np.zeros(1000)
    weights[100:116] = 1
    weights[500] = 10
    many, single = spans_around_peaks(weights)
    assert many[0] <= 100 < 116 <= many[1]
    assert single[0] <= 500 < single[1]


def test_overlapping_passages_are_merged(rng: np.random.Generator) -> None:
    (span,) = spans_around_peaks(np.where(abs(np.arange(400) - 200) < 40, 1.0, 0.0))
    assert span[0] < 165 < 235 < span[1]
    for _ in range(200):
        weights = rng.random(int(rng.integers(1, 600))) ** int(rng.integers(1, 40))
        spans = spans_around_peaks(weights)
        assert 1 <= len(spans) <= MAX_PASSAGES
        assert all(0 <= start < end <= len(weights) for start, end in spans)
        assert all(before[1] < behind[0] for before, behind in pairwise(spans))


def test_passages_are_disjoint_and_inside_the_text(rng: np.random.Generator) -> None:
    for _ in range(100):
        pieces = [str(rng.choice(["a", " b", "c ", "\n", ""])) for _ in range(rng.integers(1, 500))]
        text = FakeText(pieces, {int(i): 1.0 for i in rng.integers(0, len(pieces), 5)})
        spans = text.passages()
        assert all(0 <= span.start < span.end <= len(pieces) for span in spans)
        assert all(before.end <= behind.start for before, behind in pairwise(spans))
        assert all(span.text and span.text == span.text.strip() for span in spans)


def test_special_tokens_have_no_text_and_end_words() -> None:
    """As in `Llama.detokenize` without `special`."""
    assert whole_words([b"x", b"", b"y", b"z"], 2, 3) == (2, 4)
    (span,) = FakeText(["", "user", "\n", "Hi", "", ""], {3: 1.0}).passages()
    assert (span.start, span.end, span.text) == (0, 6, "user\nHi")
    assert FakeText([""] * 9, {3: 1.0}).passages() == []
