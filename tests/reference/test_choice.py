"""Row selection of a head: pinned, recent and best rows in fair shares of the text."""

from __future__ import annotations

from typing import Any

import numpy as np

from random_cases import Cases
from research.reference import margin, select


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
