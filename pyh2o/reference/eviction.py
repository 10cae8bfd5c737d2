"""H2O eviction: which rows of one (layer, KV head) survive a compaction.

The rule is that of the authors' real dropping cache (FMInference/H2O,
`h2o_hf/utils_real_drop/modify_llama.py`, class `H2OKVCache_LayerWise`): keep the last `recent`
rows and the `heavy` best scores of the others. Three additions: `pinned` rows at the start of the
text, `slack` rows so that one compaction serves many tokens, and a rule for equal scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class EvictionParameters:
    """How many rows each (layer, KV head) keeps. All are token counts.

    Right after a compaction there are `budget` rows. New tokens fill up the slack; the tokens that
    would not fit below `capacity` cause the next compaction. With `slack=1` and tokens that come
    one at a time this is the algorithm of the paper: attend `budget + 1` rows, then evict one.

    Raises:
        ValueError: a count is not an integer or too small, or the rows outnumber the positions.
    """

    heavy: int  # rows kept for their score
    recent: int  # rows of the newest positions, at least 1: a new row has no score to live by
    pinned: int = 0  # rows of positions 0 .. pinned - 1
    slack: int = 1  # rows beyond the budget between two compactions, at least 1
    n_pos: int | None = None  # positions rotary embeddings may use; None: as many as there are
    dense: bool = False  # dense positions at every compaction, not half of n_pos when used up

    def __post_init__(self) -> None:
        for name in ("heavy", "recent", "pinned", "slack"):
            count = getattr(self, name)
            least = 1 if name in ("recent", "slack") else 0
            if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < least:
                raise ValueError(f"{name} must be an integer >= {least}, not {count!r}")
        if self.n_pos is not None and self.n_pos < self.capacity:
            raise ValueError(f"n_pos must be >= the capacity of {self.capacity}, not {self.n_pos}")

    @property
    def budget(self) -> int:
        """Rows per (layer, KV head) right after a compaction."""
        return self.pinned + self.heavy + self.recent

    @property
    def capacity(self) -> int:
        """Rows per (layer, KV head) that are never exceeded."""
        return self.budget + self.slack


def select(
    scores: FloatArray, positions: IntArray, *, pinned: int, heavy: int, recent: int
) -> IntArray:
    """Choose the rows of one (layer, KV head) that a compaction keeps.

    Kept are the rows of positions below `pinned`, those of the last `recent` positions
    (position > newest - recent, where newest is the highest position given), and of the rest those
    with the highest scores, until the budget of pinned + heavy + recent rows is full: `heavy` rows,
    or more where some pinned or recent positions have no row any more because the tail of the text
    was removed. So every head keeps as many. Of equal scores the higher position wins.

    Args:
        scores: [n_rows] attention each row has collected.
        positions: [n_rows] token position of each row, all different, in any order.
        pinned, heavy, recent: token counts, >= 0.

    Returns:
        [n_kept] indices into `scores`, ascending, so that a gather keeps the rows in order.

    Raises:
        ValueError: the shapes differ, a position occurs twice, a score is not a number, or a
            count is negative.
    """
    candidates = _candidates(scores, positions, pinned=pinned, recent=recent)
    if heavy < 0:
        raise ValueError(f"heavy must be >= 0, not {heavy}")
    # lexsort sorts by its last key first: score, then position; both ascending.
    ascending = candidates[np.lexsort((positions[candidates], scores[candidates]))]
    evicted = ascending[: max(0, positions.size - (pinned + heavy + recent))]
    return np.setdiff1d(np.arange(positions.size), evicted, assume_unique=True)


def margin(
    scores: FloatArray, positions: IntArray, kept: IntArray, *, pinned: int, recent: int
) -> float:
    """How clear a choice of :func:`select` was: lowest kept minus highest evicted score.

    Two implementations that differ by rounding may choose differently where this is as small as
    their rounding. Pinned and recent rows do not compete, so they are left out.

    Args:
        scores, positions: [n_rows] as given to :func:`select`.
        kept: [n_kept] what it returned.
        pinned, recent: token counts, as given to :func:`select`.

    Returns:
        The difference, >= 0; infinity where nothing competed.
    """
    candidates = _candidates(scores, positions, pinned=pinned, recent=recent)
    is_kept = np.isin(candidates, kept)
    winners, losers = scores[candidates[is_kept]], scores[candidates[~is_kept]]
    if winners.size == 0 or losers.size == 0:
        return float("inf")
    return float(winners.min()) - float(losers.max())


def _candidates(scores: FloatArray, positions: IntArray, *, pinned: int, recent: int) -> IntArray:
    """Indices of the rows that are neither pinned nor recent: those that must earn their place."""
    if scores.ndim != 1 or scores.shape != positions.shape:
        raise ValueError(
            f"scores and positions must be [n_rows], not {scores.shape} and {positions.shape}"
        )
    if pinned < 0 or recent < 0:
        raise ValueError(f"pinned and recent must be >= 0, not {pinned} and {recent}")
    if np.isnan(scores).any():
        raise ValueError("a score is not a number (nan)")
    if np.unique(positions).size != positions.size:
        raise ValueError("positions must all be different")
    if positions.size == 0:
        return np.empty(0, dtype=np.int64)
    newest = positions.max()
    return np.flatnonzero((positions >= pinned) & (positions <= newest - recent))
