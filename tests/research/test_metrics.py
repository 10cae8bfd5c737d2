"""Divergences, self-BLEU and their like, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from research.eval.metrics import (
    bleu,
    distinct,
    divergence,
    gap_closed,
    log_softmax,
    mean_and_error,
    perplexity,
    repeated,
    self_bleu,
    share_within,
    surprises,
)


def log_probs(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows, dtype=np.float32))


def test_log_softmax_adds_up_to_one_and_survives_large_logits() -> None:
    logits = np.array([[0.0, math.log(3.0)], [1000.0, 1000.0]], dtype=np.float32)
    expected = log_probs([0.25, 0.75], [0.5, 0.5])
    np.testing.assert_allclose(log_softmax(logits), expected, atol=1e-6)
    assert logits[1, 0] == 1000.0  # the argument is not changed


def test_surprises_and_perplexity() -> None:
    losses = surprises(log_probs([0.25, 0.75], [0.5, 0.5]), [0, 1])
    np.testing.assert_allclose(losses, [math.log(4), math.log(2)], rtol=1e-6)
    assert perplexity(losses) == pytest.approx(math.sqrt(8))


def test_divergence() -> None:
    full, other = log_probs([0.5, 0.5], [0.9, 0.1]), log_probs([0.25, 0.75], [0.9, 0.1])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    np.testing.assert_allclose(divergence(full, other), [expected, 0.0], atol=1e-6)


def test_mean_and_error() -> None:
    assert mean_and_error(np.array([1.0, 3.0])) == (2.0, 1.0)
    assert mean_and_error(np.array([5.0])) == (5.0, None)
    # blocks (1, 3) and (5, 7), whose means are 2 and 6; the last value is in the mean alone
    assert mean_and_error(np.array([1.0, 3.0, 5.0, 7.0, 9.0]), block=2) == (5.0, 2.0)


@pytest.mark.parametrize(("value", "expected"), [(2.0, 1.0), (3.0, 0.0), (2.25, 0.75), (3.5, -0.5)])
def test_gap_closed(value: float, expected: float) -> None:
    assert gap_closed(2.0, 3.0, value) == expected
    assert gap_closed(3.0, 3.0, value) is None


def test_distinct_and_repeated() -> None:
    words = ["a", "b", "a", "b", "a"]
    assert distinct(words, 1) == 2 / 5
    assert distinct(words, 2) == 2 / 4  # ab ba ab ba
    assert repeated(words, 2) == 2 / 4
    assert distinct(words, 6) is None
    assert repeated(words, 6) is None


def test_bleu() -> None:
    text = ["the", "cat", "sat", "on", "the", "mat"]
    assert bleu(text, [text]) == pytest.approx(1.0)
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 fours; equal lengths
    other = ["the", "cat", "sat", "on", "a", "mat"]
    expected = (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu(other, [text]) == pytest.approx(expected)
    # counts are clipped: one of four "the"; no longer match, and 0.1 stands for none
    expected = (2 / 4 * 0.1 / 3 * 0.1 / 2 * 0.1 / 1) ** 0.25 * math.exp(1 - 6 / 4)
    assert bleu(["the"] * 4, [text]) == pytest.approx(expected)
    assert bleu([], [text]) == 0.0


def test_self_bleu() -> None:
    one, other = ["a", "b", "c", "d", "e"], ["v", "w", "x", "y", "z"]
    assert self_bleu([one, one, one]) == pytest.approx(1.0)
    low = (0.1 / 5 * 0.1 / 4 * 0.1 / 3 * 0.1 / 2) ** 0.25
    assert self_bleu([one, other]) == pytest.approx(low)
    assert self_bleu([one]) is None


def test_share_of_places_within_spans() -> None:
    spans = [(16, 80), (160, 224)]
    places = [(16, 20), (70, 80), (70, 81), (160, 224), (100, 110)]
    assert share_within(places, spans, before=1000) == 3 / 5
    assert share_within(places, spans, before=100) == 2 / 3
    assert share_within(places, [], before=1000) == 0.0
    assert share_within([(70, 90)], [(16, 80), (80, 96)], before=1000) == 1.0
    assert share_within(places, spans, before=10) is None
    assert share_within([], spans, before=1000) is None
