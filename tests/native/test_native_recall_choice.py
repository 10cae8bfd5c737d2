"""The native choice of what is recalled, on its own, against the NumPy reference."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compiled import NATIVE, compile_library, int32s, pointer, sizes_of
from pyh2o.reference.recall_choice import (
    BLOCK,
    PAGE,
    RecalledSpan,
    block_sums,
    block_weights,
    choose_blocks,
    least_place,
    missed_masses,
    recalled_places,
    spans_of,
    taken_positions,
)
from random_cases import Cases

FloatArray = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def parts() -> ctypes.CDLL:
    sources = [
        Path(__file__).parent / "parts" / "recall.cpp",
        NATIVE / "src" / "recall" / "h2o-recall-choice.cpp",
    ]
    return compile_library("recall", sources)


# ---- masses ----


def maxima_and_sums(logits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Over the last axis, as the scan gives them."""
    peaks = logits.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        sums = np.exp(logits - np.maximum(peaks, -1e30)[..., None]).sum(axis=-1)
    return np.ascontiguousarray(peaks), np.ascontiguousarray(sums)


def weigh(
    parts: ctypes.CDLL,
    hidden: FloatArray,
    resident: FloatArray,
    n_group: int,
    sinks: FloatArray | None = None,
) -> tuple[FloatArray, npt.NDArray[np.float64]]:
    """Masses and weights [n_blocks], of logits [n_blocks, n_rows, n], [n_rows, n] and [n_group]."""
    n_blocks, n_rows = hidden.shape[:2]
    mass, weight = np.empty(n_blocks, np.float32), np.empty(n_blocks)
    parts.weigh_blocks(
        sizes_of(n_rows, n_group, n_blocks),
        *map(pointer, (*maxima_and_sums(hidden), *maxima_and_sums(resident), sinks, mass, weight)),
    )
    return mass, weight


def test_masses_are_one_softmax_over_hidden_and_resident_rows(
    parts: ctypes.CDLL, cases: Cases
) -> None:
    """And attention sinks, which no model has that eviction accepts today."""
    for _, rng in cases(range(60)):
        n_tokens, n_group, n_blocks = (int(rng.integers(1, most)) for most in (18, 5, 9))
        n_rows = n_tokens * n_group
        spread = float(rng.choice([0.1, 1, 10, 100]))
        hidden = rng.normal(size=(n_blocks, n_rows, BLOCK)).astype(np.float32) * spread
        resident = rng.normal(size=(n_rows, int(rng.integers(0, 40)))).astype(np.float32) * spread
        hidden[rng.random(hidden.shape) < rng.random()] = -np.inf
        hidden[rng.random(n_blocks) < 0.2] = -np.inf
        resident[rng.random(resident.shape) < 0.3] = -np.inf
        sinks = rng.normal(size=n_group).astype(np.float32) * spread if rng.integers(2) else None
        mass, weight = weigh(parts, hidden, resident, n_group, sinks)

        logits = np.concatenate([*hidden.astype(np.float64), resident], axis=1)
        if sinks is not None:
            logits = np.column_stack([logits, np.tile(sinks, n_tokens)])
        peaks = logits.max(axis=1, keepdims=True)
        exps = np.exp(logits - np.maximum(peaks, -1e30))
        total = exps.sum(axis=1, keepdims=True)
        shares = np.divide(exps, total, out=np.zeros_like(exps), where=total > 0)
        of_blocks = shares[:, : n_blocks * BLOCK].reshape(n_tokens, n_group, n_blocks, BLOCK)
        expected = of_blocks.sum(axis=3).mean(axis=0)
        np.testing.assert_allclose(mass, expected.sum(axis=0), rtol=2e-5, atol=1e-30)
        np.testing.assert_allclose(weight, (expected**2).sum(axis=0), rtol=5e-5, atol=1e-60)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masses_are_always_numbers(parts: ctypes.CDLL, bad: float) -> None:
    """Weights that are none have no order, and sorting them could do anything."""
    hidden, resident = np.zeros((3, 2, BLOCK), np.float32), np.zeros((2, BLOCK), np.float32)
    for array in (hidden[1, :1, :1], resident[:1, :1], hidden[:, 0], resident[0]):
        array.fill(bad)
        for result in weigh(parts, hidden, resident, 1):
            assert np.all(result >= 0)
            assert np.all(result <= 1)


# ---- the choice ----


@dataclass(frozen=True)
class Choice:
    positions: npt.NDArray[np.int64]  # [n_heads, n_rows]
    places: npt.NDArray[np.int64]  # of those
    spans: list[RecalledSpan]
    hidden: float
    missed: float


def native_choice(
    parts: ctypes.CDLL,
    masses: npt.NDArray[np.float64],
    hidden: npt.NDArray[np.bool_],
    archived: npt.NDArray[np.int64],
    n_rows: int,
    shift: int,
    n_pos: int,
) -> Choice:
    """Of masses [n_heads, n_group, n_blocks], for what is hidden [n_heads, n_archived]."""
    n_heads, n_group, n_blocks = masses.shape
    first, start = int(archived[0]), int(archived[0]) // PAGE * PAGE
    # the native choice looks at whole pages, from the first one's start on
    resident = np.pad(~hidden, [(0, 0), (first - start, 0)]).astype(np.uint8)
    before = [(0, 0), (first // BLOCK - start // BLOCK, 0)]
    mass = np.pad(masses.sum(axis=1), before).astype(np.float32)
    weight = np.pad((masses**2).sum(axis=1), before)
    pos = np.full(n_heads * n_rows, -1, dtype=np.int32)
    spans, weights = np.empty((n_blocks + 4, 3), dtype=np.int32), np.empty(n_blocks + 4)
    n_spans, shares = ctypes.c_int32(), np.empty(2)
    n_taken = parts.choose_rows(
        pointer(int32s([start, first, archived[-1] + 1])),
        sizes_of(n_heads, n_heads * n_group, n_rows),
        *map(pointer, (resident, mass, weight)),
        pointer(int32s([shift, archived[-1] + 1 - shift, n_pos])),
        pointer(pos),
        ctypes.byref(n_spans),
        *map(pointer, (spans, weights, shares)),
    )
    taken = pos[: n_heads * n_taken].reshape(n_heads, n_taken).astype(np.int64)
    places = np.empty_like(taken)
    for begin, end, place in spans[: n_spans.value]:
        inside = (begin <= taken) & (taken < end)
        places[inside] = place + taken[inside] - begin
    return Choice(
        taken,
        places,
        [
            RecalledSpan(int(begin), int(end), float(weight))
            for (begin, end, _), weight in zip(spans[: n_spans.value], weights, strict=False)
        ],
        *map(float, shares),
    )


def reference_choice(
    masses: npt.NDArray[np.float64],
    hidden: npt.NDArray[np.bool_],
    archived: npt.NDArray[np.int64],
    n_rows: int,
    shift: int,
    n_pos: int,
) -> Choice:
    weights = block_weights(masses)
    n_hidden = block_sums(hidden.astype(np.int64), archived)
    chosen = choose_blocks(weights, n_hidden, n_rows)
    if chosen.n_rows == 0:
        none = np.empty((len(masses), 0), dtype=np.int64)
        mass = float(masses.sum(axis=2).mean())
        return Choice(none, none, [], mass, mass)
    spans = spans_of(chosen.blocks, weights, archived)
    least = least_place(spans, int(archived[-1]) + 1 - shift, n_pos)
    positions = np.stack([taken_positions(chosen, head, archived) for head in hidden])
    taken = (archived == positions[..., None]).any(axis=1)
    n_taken = block_sums(taken.astype(np.int64), archived)
    missed = missed_masses(masses, n_hidden[:, None], n_taken[:, None])
    return Choice(
        positions,
        np.stack([recalled_places(head, spans, shift, least) for head in positions]),
        spans,
        float(masses.sum(axis=2).mean()),
        float(missed.sum(axis=2).mean()),
    )


def assert_same_choice(found: Choice, expected: Choice) -> None:
    np.testing.assert_array_equal(found.positions, expected.positions)
    assert found.spans == expected.spans
    np.testing.assert_array_equal(found.places, expected.places)
    assert found.hidden == pytest.approx(expected.hidden, abs=1e-6)
    assert found.missed == pytest.approx(expected.missed, abs=1e-6)


def test_random_choices(parts: ctypes.CDLL, cases: Cases) -> None:
    """Few masses, so that equal weights are common, and exact ones, so that they are equal."""
    for _, rng in cases(range(500)):
        n_heads, n_group = int(rng.integers(1, 7)), int(rng.integers(1, 4))
        first = int(rng.choice([0, rng.integers(0, 300)]))
        archived = first + np.arange(int(rng.integers(1, 400)))
        hidden = rng.random((n_heads, archived.size)) < rng.random((n_heads, 1))
        if rng.integers(2):
            # places that every head, or some, holds in full
            held = rng.random(archived.size // 40 + 1) < 0.4
            hidden[rng.random(n_heads) < 0.7] &= ~np.repeat(held, 40)[: archived.size]
        n_blocks = archived[-1] // BLOCK - archived[0] // BLOCK + 1
        masses = rng.integers(0, 4, (n_heads, n_group, n_blocks)) / 64
        masses *= rng.random(n_blocks) < rng.random()
        arguments: Any = (masses, hidden, archived, int(rng.integers(0, 200)))
        shift = int(rng.choice([0, rng.integers(0, archived[-1] + 2)]))
        n_pos = int(rng.integers(0, 600))
        found = native_choice(parts, *arguments, shift, n_pos)
        assert_same_choice(found, reference_choice(*arguments, shift, n_pos))


def test_an_archive_that_begins_inside_a_page(parts: ctypes.CDLL) -> None:
    """Blocks before it are in no span."""
    archived = np.arange(40, 90)
    hidden = np.ones((1, archived.size), dtype=np.bool_)
    masses = np.zeros((1, 1, 4))
    masses[0, 0, 0] = 0.5
    found = native_choice(parts, masses, hidden, archived, 30, 0, 4096)
    assert found.spans == [RecalledSpan(40, 80, 0.25)]
    np.testing.assert_array_equal(found.positions[0], np.arange(40, 70))
    np.testing.assert_array_equal(found.places[0], np.arange(40, 70))
