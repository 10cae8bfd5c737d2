"""Which blocks are recalled, what each head takes of them and where it goes: by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o.reference.recall_choice import (
    BLOCK,
    BlockList,
    RecalledSpan,
    block_sums,
    block_weights,
    choose_blocks,
    far_places,
    least_place,
    missed_masses,
    recalled_places,
    spans_of,
    taken_positions,
    wanted_blocks,
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


def test_a_block_is_wanted_for_its_neighbours_sake() -> None:
    """Nearly as much as the two before it and the one behind; then half, and three tenths."""
    weights = np.array([0, 0, 0, 8.0, 0, 0, 0, 3, 0])
    expected = [8 * 0.7 * 0.3**2, 8 * 0.7 * 0.3, 8 * 0.7, 8, 8 * 0.9, 8 * 0.8, 3.2, 3, 2.7]
    np.testing.assert_allclose(wanted_blocks(weights), expected)


def test_a_block_of_its_own_weight_is_wanted_for_it() -> None:
    np.testing.assert_allclose(wanted_blocks(np.array([4.0, 3.7, 0.5])), [4, 3.7, 3.33])
    np.testing.assert_allclose(wanted_blocks(np.array([1.0])), [1])
    np.testing.assert_allclose(wanted_blocks(np.zeros(3)), 0)


def blocks_of(weights: list[float], n_rows: int) -> list[int]:
    """Of heads that hold none of the rows."""
    n_hidden = np.full((1, len(weights)), BLOCK)
    return list(choose_blocks(np.array(weights), n_hidden, n_rows).blocks)


def test_what_stands_out_brings_more_of_its_neighbours() -> None:
    """Once 100 beside 6, 6 and 6; once 10 beside them."""
    assert blocks_of([0, 0, 100, 0, 0, 0, 0, 6, 6, 6], 6 * BLOCK) == [2, 3, 4, 1, 5, 0]
    assert blocks_of([0, 0, 10, 0, 0, 0, 0, 6, 6, 6], 7 * BLOCK) == [2, 3, 4, 1, 9, 8, 7]


def test_of_equal_weights_the_newer_block_is_first() -> None:
    assert blocks_of([5, 0, 0, 0, 0, 5, 0], 4 * BLOCK) == [5, 0, 6, 1]


def test_nothing_without_weight_is_listed() -> None:
    assert blocks_of([0, 0, 0], 1) == []


def test_the_list_ends_when_every_head_is_served() -> None:
    """Blocks 5, 6, 7, 4, 0. The first head finds 16 a block; the second holds 4 and half of 5."""
    weights = np.array([1.5, 0, 0, 0, 0, 4, 0, 0])
    n_hidden = np.array([[16] * 8, [16, 16, 16, 16, 0, 8, 16, 16]])
    for n_rows, blocks in (
        (0, ()),
        (8, (5,)),
        (9, (5, 6)),
        (40, (5, 6, 7)),
        (41, (5, 6, 7, 4, 0)),
    ):
        chosen = choose_blocks(weights, n_hidden, n_rows)
        assert (chosen.blocks, chosen.n_rows) == (blocks, n_rows)


def test_all_heads_take_as_few_as_the_one_with_fewest() -> None:
    few = np.array([[16, 16, 16], [1, 0, 4]])
    chosen = choose_blocks(np.array([1.0, 2, 3]), few, 40)
    assert chosen.n_rows == 5


def test_the_margin_is_of_the_blocks_that_were_compared() -> None:
    """4, 3.6, 3.2, 2.5, 2.25, 2, 1.8, 1.8: the last one looked at is the best not needed."""
    weights = np.array([4.0, 0, 0, 0, 2.5, 0, 0, 0, 1.8, 0, 0, 0, 1.8])
    n_hidden = np.full((1, 13), 16)
    for n_rows, margin in ((0, np.inf), (10, 0.1), (96, 0.1), (112, 0)):
        assert choose_blocks(weights, n_hidden, n_rows).margin == pytest.approx(margin)


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


def test_nothing_is_put_at_the_end_of_the_positions() -> None:
    """No further away than 30 of 90 positions, or 2 * 20 if there are 20 rows."""
    few, many = [RecalledSpan(0, 10, 1)], [RecalledSpan(0, 10, 1), RecalledSpan(20, 30, 1)]
    assert least_place(few, 80, 90) == 50
    assert least_place(many, 80, 90) == 40
    assert least_place(few, 20, 90) == 0
    assert least_place(few, 80, None) == 0
    positions = np.array([3, 20, 29])
    assert recalled_places(positions, many, 0, 15).tolist() == [18, 25, 34]
    assert recalled_places(positions, many, 0, 5).tolist() == [8, 20, 29]


def test_what_is_missed() -> None:
    """All of a block, none, a quarter; and a block that the head holds has no mass."""
    masses = np.array([0.1, 0.2, 0.4, 0.0])
    missed = missed_masses(masses, np.array([16, 5, 8, 0]), np.array([0, 5, 6, 0]))
    np.testing.assert_allclose(missed, [0.1, 0, 0.1, 0])


# ---- all of it, written a second time ----


def naive(
    weights: list[float],
    hidden: list[set[int]],
    first: int,
    end: int,
    n_rows: int,
    shift: int,
    n_pos: int,
) -> list[dict[int, int]]:
    """Place by position, of each head, row by row."""

    def positions_of(block: int) -> list[int]:
        start = (first // 16 + block) * 16
        return [p for p in range(start, start + 16) if first <= p < end]

    def share(distance: int) -> float:
        """Of the weight of a block that is so far before it."""
        near = {-1: 0.7, 0: 1.0, 1: 0.9, 2: 0.8}
        if distance in near:
            return near[distance]
        return 0.8 * 0.5 ** (distance - 2) if distance > 0 else 0.7 * 0.3 ** (-1 - distance)

    def wanted(block: int) -> float:
        """For the neighbour, however far away, for whose sake it is wanted most."""
        return max(weight * share(block - other) for other, weight in enumerate(weights))

    n_most = min([n_rows] + [len(of_head) for of_head in hidden])
    listed: list[int] = []
    taken: list[list[int]] = [[] for _ in hidden]
    for block in sorted(range(len(weights)), key=lambda b: (wanted(b), b), reverse=True):
        if wanted(block) == 0 or min(len(of_head) for of_head in taken) >= n_most:
            break
        listed.append(block)
        for mine, of_head in zip(taken, hidden, strict=True):
            mine += [p for p in positions_of(block) if p in of_head]
    n_most = min([n_most] + [len(of_head) for of_head in taken])
    in_list = sorted(p for block in listed for p in positions_of(block))
    least = max(0, end - shift - max(n_pos // 3, 2 * len(in_list)))
    places: dict[int, int] = {}
    for position in in_list:
        if position - 1 in places:
            places[position] = places[position - 1] + 1
        else:
            places[position] = max(position - shift, max(places.values(), default=least - 1) + 1)
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
        n_pos = int(rng.integers(0, 600))

        chosen = choose_blocks(weights, n_hidden, n_rows)
        spans = spans_of(chosen.blocks, weights, archived)

        sets = [set(archived[of_head].tolist()) for of_head in hidden]
        end = int(archived[-1]) + 1
        for of_head, expected in zip(
            hidden, naive(weights.tolist(), sets, first, end, n_rows, shift, n_pos), strict=True
        ):
            assert len(expected) == chosen.n_rows
            if chosen.n_rows:
                positions = taken_positions(chosen, of_head, archived)
                least = least_place(spans, end - shift, n_pos)
                places = recalled_places(positions, spans, shift, least)
                assert dict(zip(positions.tolist(), places.tolist(), strict=True)) == expected
