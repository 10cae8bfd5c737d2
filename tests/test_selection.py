"""The native selection against the NumPy one, on random rows."""

from __future__ import annotations

import numpy as np
import pytest

from pyh2o.reference import select as reference_select
from pyh2o.settings import Budget


@pytest.mark.parametrize("attempt", range(200))
def test_native_and_reference_keep_the_same_rows(rng: np.random.Generator, attempt: int) -> None:
    from pyh2o.cache import select

    n_rows = int(rng.integers(0, 60))
    positions = rng.choice(100, n_rows, replace=False).astype(np.int32)
    # few distinct values, so that equal scores are common
    scores = rng.integers(0, 8, n_rows).astype(np.float32) / 4
    heavy, pinned = (int(n) for n in rng.integers(0, 20, 2))
    recent = int(rng.integers(1, 20))

    budget = Budget(window=100, heavy=heavy, recent=recent, pinned=pinned, slack=1)
    expected = np.zeros(n_rows, dtype=np.bool_)
    expected[
        reference_select(
            scores, positions.astype(np.int64), pinned=pinned, heavy=heavy, recent=recent
        )
    ] = True
    np.testing.assert_array_equal(select(scores, positions, budget), expected)
