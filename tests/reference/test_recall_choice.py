"""Which blocks are recalled, what each head takes of them and where it goes: by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o.reference.recall_choice import (
    BlockList,
    RecalledSpan,
    block_sums,
    block_weights,
    choose_blocks,
    far_places,
    listed_blocks,
    missed_masses,
    recalled_places,
    spans_of,
    taken_positions,
)
from random_cases import Cases

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


# ---- weights ----


def test_masses_are_summed_by_block() -> None:
    """An archive of positions 10 .. 40 has a part of block 0, block 1, and a part of block 2."""
    archived = np.arange(10, 41)
    sums = block_sums(np.stack([np.ones(31), archived]), archived)
    np.testing.assert_array_equal(sums[0], [6, 16, 9])
    np.testing.assert_array_equal(sums[1], [sum(range(10, 16)), sum(range(16, 32)), 9 * 36])


def test_weights_by_hand() -> None:
    """One head that points at block 1 weighs more than four that look at block 0 a little."""
    masses = np.array([[[0.1, 0.0], [0.1, 0.0]], [[0.1, 0.3], [0.1, 0.0]]])
    np.testing.assert_allclose(block_weights(masses), [0.04, 0.09])


# ---- the list ----


def blocks_of(*weights: float) -> list[int]:
    return [block for _, block in listed_blocks(np.array(weights))]


def test_a_peak_stands_for_its_neighbours() -> None:
    """Block 4 and with it 3, 5, 6; then 8 and with it 7, 9, 10; no other has a weight."""
    weights = np.zeros(12)
    weights[[4, 8]] = [3, 2]
    first, second = [(0, 3), (0, 4), (0, 5), (0, 6)], [(1, 7), (1, 8), (1, 9), (1, 10)]
    assert list(listed_blocks(weights)) == first + second


def test_blocks_in_the_list_are_not_added_again() -> None:
    """Peaks 2, 3 and 7: around 2 are 1 .. 4, and 3 adds 5 only."""
    assert blocks_of(0, 0, 9, 8, 0, 0, 0, 7, 0, 0, 0) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_the_ends_of_the_archive_have_fewer_neighbours() -> None:
    assert blocks_of(9, 0, 0, 0, 0, 0, 8) == [0, 1, 2, 5, 6]
    assert blocks_of(1) == [0]


def test_of_equal_weights_the_newer_block_is_first() -> None:
    assert blocks_of(5, 0, 0, 0, 0, 5, 0, 0) == [4, 5, 6, 7, 0, 1, 2]


def test_nothing_without_weight_is_listed() -> None:
    assert blocks_of(0, 0, 0) == []


def test_the_list_ends_when_every_head_is_served() -> None:
    """Peaks 5, 0. The first head finds 16 a block; the second holds block 4 and half of 5."""
    weights = np.array([2.0, 0, 0, 0, 0, 4, 0, 0])
    n_hidden = np.array([[16] * 8, [16, 16, 16, 16, 0, 8, 16, 16]])
    for n_rows, blocks in (
        (0, ()),
        (8, (4, 5)),
        (9, (4, 5, 6)),
        (40, (4, 5, 6, 7)),
        (41, (4, 5, 6, 7, 0)),
    ):
        chosen = choose_blocks(weights, n_hidden, n_rows)
        assert (chosen.blocks, chosen.n_rows) == (blocks, n_rows)


def test_all_heads_take_as_few_as_the_one_with_fewest() -> None:
    """By what there is at all, and by what is in the list once no peak has weight."""
    few = np.array([[16, 16, 16], [1, 0, 4]])
    chosen = choose_blocks(np.array([1.0, 2, 3]), few, 40)
    assert chosen.n_rows == 5
    far = np.array([[16, 16, 16, 16, 16], [3, 0, 0, 16, 16]])
    chosen = choose_blocks(np.array([1.0, 0, 0, 0, 0]), far, 40)
    assert (chosen.blocks, chosen.n_rows) == ((0, 1, 2), 3)


def test_the_margin_is_of_the_weights_that_were_compared() -> None:
    """The last one looked at is the best that was not needed; those below do not matter."""
    weights = np.array([4.0, 0, 0, 0, 2, 0, 0, 0, 1.8, 0, 0, 0, 1.8])
    n_hidden = np.full((1, 13), 16)
    assert choose_blocks(weights, n_hidden, 10).margin == pytest.approx(0.5)
    assert choose_blocks(weights, n_hidden, 60).margin == pytest.approx(0.1)
    assert choose_blocks(weights, n_hidden, 130).margin == 0
    assert choose_blocks(weights, n_hidden, 0).margin == np.inf


# ---- what a head takes, and where it goes ----


def test_a_head_takes_the_first_that_it_does_not_hold() -> None:
    archived = np.arange(20, 70)  # blocks 0 .. 3 of it are 20-31, 32-47, 48-63, 64-69
    hidden = np.ones(50, dtype=np.bool_)
    hidden[[0, 1, 30]] = False  # 20, 21 and 50 are held
    chosen = BlockList(blocks=(2, 3, 0), n_rows=24, margin=1.0)
    expected = [22, 23, 24, 48, 49, *range(51, 70)]
    assert taken_positions(chosen, hidden, archived).tolist() == expected


def test_adjacent_blocks_are_one_span() -> None:
    """In the order of the text, cut off at the ends of the archive, with their weights added up."""
    weights = np.array([1.0, 2, 4, 8, 16])
    assert spans_of((2, 4, 3, 0), weights, np.arange(5, 75)) == [
        RecalledSpan(5, 16, 1.0),
        RecalledSpan(32, 75, 28.0),
    ]


def test_hidden_keys_are_looked_at_from_afar() -> None:
    """A page that was moved below 0 begins there; the archive need not begin with a page."""
    positions = np.array([0, 63, 64, 70, 127, 128, 500])
    assert far_places(positions, 0).tolist() == positions.tolist()
    assert far_places(positions, 100).tolist() == [0, 63, 0, 6, 63, 28, 400]
    assert far_places(np.array([70, 71]), 100).tolist() == [6, 7]


def test_spans_do_not_lie_upon_each_other() -> None:
    """Two that were moved below 0 lie at the start, one behind the other; a third finds room."""
    spans = [RecalledSpan(16, 48, 1), RecalledSpan(80, 96, 1), RecalledSpan(400, 416, 1)]
    positions = np.array([[16, 47, 80, 95, 400], [20, 21, 90, 410, 415]])
    assert recalled_places(positions, spans, 0).tolist() == positions.tolist()
    assert recalled_places(positions, spans, 100).tolist() == [
        [0, 31, 32, 47, 300],
        [4, 5, 42, 310, 315],
    ]
    assert recalled_places(positions, spans, 1000).tolist() == [
        [0, 31, 32, 47, 48],
        [4, 5, 42, 58, 63],
    ]


def test_what_is_missed() -> None:
    """All of a block, none, a quarter; and a block that the head holds has no mass."""
    masses = np.array([0.1, 0.2, 0.4, 0.0])
    missed = missed_masses(masses, np.array([16, 5, 8, 0]), np.array([0, 5, 6, 0]))
    np.testing.assert_allclose(missed, [0.1, 0, 0.1, 0])


# ---- all of it, written a second time ----


def naive(
    weights: list[float], hidden: list[set[int]], first: int, end: int, n_rows: int, shift: int
) -> list[dict[int, int]]:
    """Place by position, of each head, row by row."""

    def positions_of(block: int) -> list[int]:
        start = (first // 16 + block) * 16
        return [p for p in range(start, start + 16) if first <= p < end]

    n_most = min([n_rows] + [len(of_head) for of_head in hidden])
    listed: list[int] = []
    taken: list[list[int]] = [[] for _ in hidden]
    remaining = dict(enumerate(weights))
    while remaining and min(len(of_head) for of_head in taken) < n_most:
        peak = max(remaining, key=lambda block: (remaining[block], block))
        if remaining.pop(peak) == 0:
            break
        for block in (peak - 1, peak, peak + 1, peak + 2):
            is_new = 0 <= block < len(weights) and block not in listed
            if is_new and min(len(of_head) for of_head in taken) < n_most:
                listed.append(block)
                for mine, of_head in zip(taken, hidden, strict=True):
                    mine += [p for p in positions_of(block) if p in of_head]
    n_most = min([n_most] + [len(of_head) for of_head in taken])
    in_list = {p for block in listed for p in positions_of(block)}
    places: dict[int, int] = {}
    for position in sorted(in_list):
        if position - 1 in places:
            places[position] = places[position - 1] + 1
        else:
            places[position] = max(position - shift, max(places.values(), default=-1) + 1)
    return [{p: places[p] for p in sorted(mine[:n_most])} for mine in taken]


def test_a_random_choice(cases: Cases) -> None:
    """Equal weights and weights of nothing are common, and heads hold whole blocks."""
    for _, rng in cases(range(200)):
        first = int(rng.integers(0, 40))
        archived = np.arange(first, first + int(rng.integers(1, 300)))
        hidden = rng.random((3, archived.size)) < rng.random()
        hidden &= rng.random((3, 40))[:, archived // 16] < 0.9
        n_hidden = block_sums(hidden.astype(np.int64), archived)
        weights = rng.integers(0, 5, n_hidden.shape[1]) / 4
        n_rows, shift = int(rng.integers(0, 150)), int(rng.integers(0, 400))

        chosen = choose_blocks(weights, n_hidden, n_rows)
        spans = spans_of(chosen.blocks, weights, archived)

        sets = [set(archived[of_head].tolist()) for of_head in hidden]
        end = int(archived[-1]) + 1
        for of_head, expected in zip(
            hidden, naive(weights.tolist(), sets, first, end, n_rows, shift), strict=True
        ):
            assert len(expected) == chosen.n_rows
            if chosen.n_rows:
                positions = taken_positions(chosen, of_head, archived)
                places = recalled_places(positions, spans, shift)
                assert dict(zip(positions.tolist(), places.tolist(), strict=True)) == expected
