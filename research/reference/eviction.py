"""Eviction: which rows of one (layer, KV head) a compaction keeps, given their scores.

The rule is that of H2O's authors' real dropping cache (FMInference/H2O,
`h2o_hf/utils_real_drop/modify_llama.py`, class `H2OKVCache_LayerWise`): keep the last `recent` rows
and the `heavy` best scores of the others. Additions: `pinned` rows at the start of the text and
pinned spans anywhere, fair shares of the heavy rows for the parts of a text, `slack` rows so that
one compaction serves many tokens, and a rule for equal scores.

Pinned spans and fair shares are those of "The pitfalls of KV cache compression"
(https://arxiv.org/abs/2510.00231; Itisalex2/pitfalls-of-kv-cache-compression): its whitelist, and
its fair eviction, there for two parts and only one of them at a time, here for any number, and
combined.

Dropped spans are removed from the context, such as reasoning after its answer (the idea of
LightThinker, https://arxiv.org/abs/2502.15589, without its training): see :func:`drop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating[Any]]
BoolArray = npt.NDArray[np.bool_]

Span = tuple[int, int]  # positions start <= p < end


@dataclass(frozen=True)
class EvictionParameters:
    """How many rows each (layer, KV head) keeps. All counts are tokens.

    After a compaction there are `budget` rows. New tokens fill the slack; tokens that would exceed
    `capacity` trigger the next compaction. With `slack=1` and tokens that come one at a time this
    is the algorithm of the paper: attend to `budget + 1` rows, then evict one.

    Raises:
        ValueError: a count is not an integer or too small, the rows exceed the positions, spans or
            starts are not in order, or the spans exceed the heavy rows.
    """

    heavy: int  # rows kept for their score
    recent: int  # rows of the newest positions, at least 1: a new row has no score yet
    pinned: int = 0  # rows of positions 0 .. pinned - 1
    slack: int = 1  # rows beyond the budget between two compactions, at least 1
    n_pos: int | None = None  # number of rotary positions; None: unlimited
    spans: tuple[Span, ...] = ()  # also pinned, counted as heavy rows; ascending and disjoint
    starts: tuple[int, ...] = ()  # boundaries of segments with fair shares
    dropped: tuple[Span, ...] = ()  # dropped spans, evicted first; ascending and disjoint

    def __post_init__(self) -> None:
        for name in ("heavy", "recent", "pinned", "slack"):
            count = getattr(self, name)
            least = 1 if name in ("recent", "slack") else 0
            if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < least:
                raise ValueError(f"{name} must be an integer >= {least}, not {count!r}")
        if self.n_pos is not None and self.n_pos < self.capacity:
            raise ValueError(f"n_pos must be >= the capacity of {self.capacity}, not {self.n_pos}")
        _check_spans(self.spans)
        _check_starts(self.starts)
        _check_spans(self.dropped)
        n_spans = sum(max(0, end - max(start, self.pinned)) for start, end in self.spans)
        if n_spans > self.heavy:
            raise ValueError(
                f"{n_spans} positions of pinned spans do not fit the {self.heavy} heavy rows: give "
                "more heavy rows, or pin fewer"
            )

    @property
    def budget(self) -> int:
        """Rows per (layer, KV head) after a compaction."""
        return self.pinned + self.heavy + self.recent

    @property
    def capacity(self) -> int:
        """Maximum rows per (layer, KV head)."""
        return self.budget + self.slack


def select(
    scores: FloatArray,
    positions: IntArray,
    *,
    pinned: int,
    heavy: int,
    recent: int,
    spans: Sequence[Span] = (),
    starts: Sequence[int] = (),
    dropped: Sequence[Span] = (),
) -> IntArray:
    """Select the rows of one (layer, KV head) that a compaction keeps.

    Kept are the rows of positions below `pinned` and in `spans`, those of the last `recent`
    positions (position > newest - recent, where newest is the highest position given), and of the
    rest those with the highest scores, until the budget of pinned + heavy + recent rows is full:
    `heavy` rows, fewer because of `spans`, or more if some pinned or recent positions have no row
    any more because the tail of the text was removed. So every head keeps the same number. Of equal
    scores the higher position wins.

    With `starts` each segment of the text, [0, s1), [s1, s2) ... [sk, end), has its own share of
    those rows (see :func:`quotas`), in proportion to the number of its positions that are neither
    pinned nor recent, whether they still have a row or not. A segment with fewer rows than its
    share keeps all of them, and the rest of its share goes to the best scores of the others.

    Rows of `dropped` positions, recent or not, are kept only if there are fewer others than the
    budget; the oldest ones then.

    Args:
        scores: [n_rows] of each row.
        positions: [n_rows] token position of each row, all different, in any order.
        pinned, heavy, recent: token counts, >= 0.
        spans: pinned positions, each (start, end), end not included; ascending and disjoint.
        starts: first positions of segments except the first; ascending and above 0.
        dropped: dropped spans of positions that are not pinned; ascending and disjoint.

    Returns:
        [n_kept] indices into `scores`, ascending, so that a gather keeps the rows in order.

    Raises:
        ValueError: the shapes differ, a position occurs twice, a score is nan, a count is negative,
            or spans or starts are not in order.
    """
    _check_scores(scores, positions)
    if heavy < 0:
        raise ValueError(f"heavy must be >= 0, not {heavy}")
    rule: dict[str, Any] = {"pinned": pinned, "recent": recent, "spans": spans}
    competing = competing_rows(positions, **rule, dropped=dropped)
    is_gone = in_spans(positions, dropped)
    _check_starts(starts)
    candidates = np.flatnonzero(competing)
    kept = ~competing & ~is_gone
    n_places = max(0, pinned + heavy + recent - int(kept.sum()))
    lengths = _segment_lengths(positions, **rule, starts=starts, dropped=dropped)
    kept[candidates] = choose(
        scores[candidates],
        positions[candidates],
        groups=_segments(positions[candidates], starts),
        sure=quotas(lengths, n_places),
        n_places=n_places,
    )
    gone = np.flatnonzero(is_gone)
    oldest = gone[np.argsort(positions[gone])]
    kept[oldest[: max(0, n_places - candidates.size)]] = True
    return np.flatnonzero(kept)


def drop(positions: Sequence[IntArray], dropped: Sequence[Span]) -> list[IntArray]:
    """Select the rows of all (layer, KV head) pairs that stay after spans are dropped.

    These are all other rows. Every pair must keep the same number, so pairs with fewer other rows
    also keep their oldest dropped rows.

    Args:
        positions: [n_rows] of each pair, ascending; the same number for each.
        dropped: dropped spans of positions; ascending and disjoint.

    Returns:
        For each pair [n_kept] indices, ascending.
    """
    is_gone = [in_spans(of_pair, dropped) for of_pair in positions]
    n_dropped = min(int(of_pair.sum()) for of_pair in is_gone)
    kept = []
    for of_pair in is_gone:
        gone = np.flatnonzero(of_pair)
        kept.append(np.delete(np.arange(of_pair.size), gone[gone.size - n_dropped :]))
    return kept


def margin(
    scores: FloatArray,
    positions: IntArray,
    kept: IntArray,
    *,
    pinned: int,
    recent: int,
    spans: Sequence[Span] = (),
    starts: Sequence[int] = (),
    dropped: Sequence[Span] = (),
) -> float:
    """Return the margin of a selection by :func:`select`: lowest kept minus highest evicted score.

    Two implementations that differ by rounding may select differently if this is as small as their
    rounding. Pinned and recent rows do not compete, so they are ignored. With `starts` it is the
    minimum over the segments, and over all of them together if a segment left a part of its share.

    Args:
        scores, positions: [n_rows] as given to :func:`select`.
        kept: [n_kept] its result.
        pinned, recent, spans, starts, dropped: as given to :func:`select`.

    Returns:
        The difference, >= 0; infinity if no rows competed.
    """
    _check_scores(scores, positions)
    rule: dict[str, Any] = {
        "pinned": pinned,
        "recent": recent,
        "spans": spans,
        "dropped": dropped,
    }
    candidates = np.flatnonzero(competing_rows(positions, **rule))
    is_kept = np.isin(candidates, kept)
    lengths = _segment_lengths(positions, **rule, starts=starts)
    return gap(
        scores[candidates],
        is_kept,
        groups=_segments(positions[candidates], starts),
        sure=quotas(lengths, int(is_kept.sum())),
    )


def quotas(lengths: Sequence[int] | IntArray, n_places: int) -> IntArray:
    """Divide places in proportion to lengths, by largest remainders; of equal ones the later wins.

    Args:
        lengths: [n] integers >= 0.
        n_places: places, >= 0.

    Returns:
        [n] places, which sum to `n_places`; all 0 if all lengths are.
    """
    total = sum(int(length) for length in lengths)
    if total == 0:
        return np.zeros(len(lengths), dtype=np.int64)
    shares = [divmod(n_places * int(length), total) for length in lengths]
    whole = np.array([share for share, _ in shares], dtype=np.int64)
    by_remainder = sorted(range(len(shares)), key=lambda i: (shares[i][1], i), reverse=True)
    whole[by_remainder[: n_places - int(whole.sum())]] += 1
    return whole


def choose(
    scores: FloatArray, positions: IntArray, *, groups: IntArray, sure: IntArray, n_places: int
) -> BoolArray:
    """Select among competing rows: the best of each group, then the best of all others.

    Args:
        scores, positions: [n]; of equal scores the higher position wins, then the later row.
        groups: [n] group of each row: an index into `sure`.
        sure: [n_groups] rows that each group keeps, if it has so many.
        n_places: total number of kept rows, if there are so many; at least the sum of `sure`.

    Returns:
        [n] True for the kept rows.
    """
    # lexsort sorts by its last key first; all ascending, so the best come last.
    order = np.lexsort((positions, scores))
    is_sure = np.zeros(scores.size, dtype=np.bool_)
    for group, n_sure in enumerate(sure):
        members = order[groups[order] == group]
        is_sure[members[max(0, members.size - n_sure) :]] = True
    order = order[np.argsort(is_sure[order], kind="stable")]
    kept = np.zeros(scores.size, dtype=np.bool_)
    kept[order[max(0, scores.size - n_places) :]] = True
    return kept


def gap(scores: FloatArray, kept: BoolArray, *, groups: IntArray, sure: IntArray) -> float:
    """Return the smallest difference that decided in :func:`choose`; infinity if none did."""
    least = float("inf")
    for group, n_sure in enumerate(sure):
        members = groups == group
        winners, losers = np.sort(scores[members & kept]), scores[members & ~kept]
        least = min(least, _difference(winners, losers))
        # The other kept rows won against evicted rows of all groups.
        least = min(least, _difference(winners[: max(0, winners.size - n_sure)], scores[~kept]))
    return least


def pinned_rows(positions: IntArray, *, pinned: int, spans: Sequence[Span]) -> BoolArray:
    """Return [n] True for positions below `pinned` or in a span."""
    is_pinned: BoolArray = (positions < pinned) | in_spans(positions, spans)
    return is_pinned


def in_spans(positions: IntArray, spans: Sequence[Span]) -> BoolArray:
    """Return [n] True for positions in one of the spans."""
    is_in = np.zeros(positions.shape, dtype=np.bool_)
    for start, end in spans:
        is_in |= (start <= positions) & (positions < end)
    return is_in


def competing_rows(
    positions: IntArray,
    *,
    pinned: int,
    recent: int,
    spans: Sequence[Span],
    dropped: Sequence[Span] = (),
) -> BoolArray:
    """Return [n_rows] True for the competing rows: not pinned, recent or dropped.

    Raises:
        ValueError: a count is negative, or the spans are not in order.
    """
    if pinned < 0 or recent < 0:
        raise ValueError(f"pinned and recent must be >= 0, not {pinned} and {recent}")
    _check_spans(spans)
    newest = positions.max(initial=-1)
    is_recent = positions > newest - recent
    is_pinned = pinned_rows(positions, pinned=pinned, spans=spans)
    competing: BoolArray = ~is_pinned & ~is_recent & ~in_spans(positions, dropped)
    return competing


def _segments(positions: IntArray, starts: Sequence[int]) -> IntArray:
    """Return [n] index of the segment of each position."""
    segments: IntArray = np.searchsorted(np.asarray(starts), positions, side="right")
    return segments


def _segment_lengths(
    positions: IntArray,
    *,
    pinned: int,
    recent: int,
    spans: Sequence[Span],
    starts: Sequence[int],
    dropped: Sequence[Span],
) -> IntArray:
    """Return [n_segments] positions of the text whose rows compete or competed."""
    text = np.arange(positions.max(initial=-1) + 1)
    competing = competing_rows(text, pinned=pinned, recent=recent, spans=spans, dropped=dropped)
    return np.bincount(_segments(text[competing], starts), minlength=len(starts) + 1)


def _difference(winners: FloatArray, losers: FloatArray) -> float:
    if winners.size == 0 or losers.size == 0:
        return float("inf")
    lowest, highest = float(winners.min()), float(losers.max())
    return 0.0 if lowest == highest else lowest - highest  # two infinities have no difference


def _check_scores(scores: FloatArray, positions: IntArray) -> None:
    if scores.ndim != 1 or scores.shape != positions.shape:
        raise ValueError(
            f"scores and positions must be [n_rows], not {scores.shape} and {positions.shape}"
        )
    if np.isnan(scores).any():
        raise ValueError("a score is not a number (nan)")
    if np.unique(positions).size != positions.size:
        raise ValueError("positions must all be different")


def _check_spans(spans: Sequence[Span]) -> None:
    before = 0
    for start, end in spans:
        if not before <= start < end:
            raise ValueError(
                f"the span of positions {start} .. {end} is empty, out of order or overlaps: give "
                "spans (start, end) with start < end, ascending and apart"
            )
        before = end


def _check_starts(starts: Sequence[int]) -> None:
    if any(later <= earlier for earlier, later in zip((0, *starts), starts, strict=False)):
        raise ValueError(f"starts must be ascending and above 0, not {list(starts)}")
