"""Row selection of a head: pinned, recent and best rows in fair shares of the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from random_cases import Cases
from research.reference import EvictionParameters, margin, quotas, select

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


def test_select_keeps_pinned_recent_and_best_rows(cases: Cases) -> None:
    """Exactly as many as the budget, in any order of rows."""
    for _, rng in cases(range(200)):
        n_rows = int(rng.integers(1, 60))
        pinned, heavy, recent = (int(count) for count in rng.integers(0, 25, 3))
        positions = rng.choice(100, n_rows, replace=False)
        # Few different scores, so that ties are common.
        scores = rng.integers(0, 6, n_rows).astype(np.float32)

        kept = select(scores, positions, pinned=pinned, heavy=heavy, recent=recent)

        assert (np.diff(kept) > 0).all()
        must = (positions < pinned) | (positions > positions.max() - recent)
        is_kept = np.isin(np.arange(n_rows), kept)
        assert is_kept[must].all()
        assert kept.size == min(n_rows, pinned + heavy + recent)
        order = list(zip(scores.tolist(), positions.tolist(), strict=True))
        winners = [order[i] for i in np.flatnonzero(is_kept & ~must)]
        losers = [order[i] for i in np.flatnonzero(~is_kept)]
        if winners and losers:
            assert min(winners) > max(losers)
            expected = min(winners)[0] - max(losers)[0]
            assert margin(scores, positions, kept, pinned=pinned, recent=recent) == expected


def test_select_keeps_the_newer_of_equal_scores() -> None:
    scores = np.array([0, 1, 0, 0, 1, 0], dtype=np.float32)

    kept = select(scores, np.arange(6), pinned=0, heavy=3, recent=1)

    # 5 is recent, 1 and 4 have the scores, and the newest of 0, 2, 3 fills the budget.
    assert kept.tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("scores", "positions", "counts", "message"),
    [
        ([0.0, 1.0], [0], (0, 1, 1), "n_rows"),
        ([0.0, np.nan], [0, 1], (0, 1, 1), "nan"),
        ([0.0, 1.0], [3, 3], (0, 1, 1), "different"),
        ([0.0, 1.0], [0, 1], (-1, 1, 1), "pinned"),
        ([0.0, 1.0], [0, 1], (0, -1, 1), "heavy"),
        ([0.0, 1.0], [0, 1], (0, 1, -1), "recent"),
    ],
)
def test_select_refuses_invalid_arguments(
    scores: list[float], positions: list[int], counts: tuple[int, int, int], message: str
) -> None:
    pinned, heavy, recent = counts
    with pytest.raises(ValueError, match=message):
        select(np.array(scores), np.array(positions), pinned=pinned, heavy=heavy, recent=recent)


@pytest.mark.parametrize(
    "wrong", [{"heavy": -1}, {"recent": 0}, {"pinned": -1}, {"slack": 0}, {"heavy": 0.1}]
)
def test_invalid_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EvictionParameters(**{"heavy": 1, "recent": 1, "pinned": 0, "slack": 1, **wrong})


# ---- fair shares and pinned spans ----


@pytest.mark.parametrize(
    ("lengths", "n_places", "expected"),
    [
        ([10, 10], 4, [2, 2]),
        ([10, 10], 5, [2, 3]),
        ([10, 10, 10], 5, [1, 2, 2]),
        ([1, 2, 3], 4, [1, 1, 2]),  # shares 2/3, 4/3 and 2: the first has the largest remainder
        ([100, 1], 10, [10, 0]),
        ([0, 7, 0], 3, [0, 3, 0]),
        ([0, 0], 3, [0, 0]),
        ([5], 9, [9]),
        ([3, 5], 0, [0, 0]),
    ],
)
def test_quotas_equal_the_expected_shares(
    lengths: list[int], n_places: int, expected: list[int]
) -> None:
    assert quotas(lengths, n_places).tolist() == expected


def test_quotas_are_near_the_exact_shares(rng: np.random.Generator) -> None:
    for _ in range(300):
        lengths = rng.integers(0, 50, int(rng.integers(1, 8)))
        n_places = int(rng.integers(0, 200))
        given = quotas(lengths, n_places)
        if lengths.sum():
            assert given.sum() == n_places
            assert (np.abs(given - n_places * lengths / lengths.sum()) < 1).all()
            assert not given[lengths == 0].any()


def test_segments_get_shares_by_their_length_in_the_text() -> None:
    """[0, 10), [10, 30) and [30, 39] get 3, 6 and 3 of 12 rows; the others are pinned or recent.

    Positions that compete or did: 1 .. 9 except 4 and 5 (7), 10 .. 29 (20), 30 .. 36 (7). Of 12
    rows that gives 2.47, 7.06 and 2.47: 2, 7, 2, and the newer of the equal remainders gets 3.
    """
    rule: dict[str, Any] = {"pinned": 1, "recent": 3, "spans": [(4, 6)], "starts": [10, 30]}
    positions = np.array([0, 1, 2, 3, 4, 5, *range(12, 40)])
    scores = np.where(positions < 10, 100.0, positions)
    # 34 rows and a budget of 1 + 14 + 3: pinned 0, 4, 5; recent 37 .. 39; 12 free
    kept = select(scores, positions, heavy=14, **rule)
    assert positions[kept].tolist() == [0, 2, 3, 4, 5, *range(23, 30), *range(34, 40)]
    # 3 and 1, 23 and 22, 34 and 33: 0 (the first segment is a tie), 1 and 1
    assert margin(scores, positions, kept, **rule) == 0
    scores[:4] = [0, 1.5, 4, 3]
    assert margin(scores, positions, kept, **rule) == 1


def test_unused_shares_go_to_the_best_rows_of_other_segments() -> None:
    """12 rows for lengths 20, 10, 10: 6, 3, 3; the first segment has 2 rows, so 4 are left."""
    positions = np.array([3, 7, *range(20, 40), 40])
    scores = np.concatenate([[0, 0], np.arange(10), 3 * np.arange(10) + 0.5, [0]])
    kept = select(scores, positions, pinned=0, heavy=12, recent=1, starts=[20, 30])
    # Segment 2 keeps 7, 8, 9, segment 3 the last three; the best others are 4 of the third.
    assert positions[kept].tolist() == [3, 7, 27, 28, 29, *range(33, 40), 40]
    # 7 - 6 in the second segment, 9.5 - 6.5 in the third, 9.5 - 6.5 over all.
    rule: dict[str, Any] = {"pinned": 0, "recent": 1, "starts": [20, 30]}
    assert margin(scores, positions, kept, **rule) == 1
    # Now 20 - 9 in the second segment and 9.5 - 9 over all.
    scores[(positions >= 26) & (positions < 30)] = [9, 20, 20, 20]
    kept = select(scores, positions, heavy=12, **rule)
    assert margin(scores, positions, kept, **rule) == 0.5


def test_infinite_scores_have_a_margin() -> None:
    scores, positions = np.array([np.inf, np.inf, 1, 2, 0]), np.arange(5)
    rule: dict[str, Any] = {"pinned": 0, "recent": 1}
    for heavy, expected in ((1, 0), (2, np.inf), (3, 1)):
        kept = select(scores, positions, heavy=heavy, **rule)
        assert margin(scores, positions, kept, **rule) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spans": ((3, 3),)}, "3 .. 3 is empty, out of order or overlaps"),
        ({"spans": ((5, 8), (2, 4))}, "2 .. 4 is empty, out of order"),
        ({"spans": ((2, 6), (5, 8))}, "5 .. 8 is empty, out of order or overlaps"),
        ({"spans": ((-1, 2),)}, "-1 .. 2"),
        ({"spans": ((5, 10), (20, 26))}, "11 positions of pinned spans do not fit the 10 heavy"),
        ({"starts": (0, 5)}, "starts must be ascending and above 0"),
        ({"starts": (5, 5)}, "starts must be ascending"),
    ],
)
def test_invalid_spans_and_starts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvictionParameters(heavy=10, recent=5, **change)
