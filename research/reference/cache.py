"""The rows of one layer: every KV head keeps its own set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .archive import N_PAGE, LayerArchive, Rotate, Rounding, as_float16
from .attention import attention_probabilities, mean_of_groups
from .eviction import Span, in_spans
from .queries import LastQueries

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class LayerCache:
    """K and V rows of one layer, with the token position and score of each, and last queries.

    Rows are in ascending order of position. They hold rotated keys, so nothing is recomputed when
    rows between them are evicted; :meth:`rebase` rotates them to other positions.

    `keep_all=True` is another way to evict, too large for use but correct by construction: no row
    is ever dropped, evicted ones are only masked for all later queries. Both ways must give the
    same outputs.

    With an archive, rows are archived before they can be evicted. Retrieved rows are not rows in
    use: they have no scores, and a compaction ignores them.

    Attributes:
        keys, values: [n_head_kv, n_stored, head_size].
        row_positions: [n_head_kv, n_stored] token positions.
        rotary_positions: [n_head_kv, n_stored] positions the keys are rotated to.
        row_scores: [n_head_kv, n_stored] collected attention, or the scores of the last compaction
            if the policy does not use attention.
        row_squares: [n_head_kv, n_stored] squared collected attention, for policies that need it.
        evicted: [n_head_kv, n_stored] rows that no query may attend to.
        queries: the last ones, for policies that need them.
        archive: of this layer, or None.
        dropped: dropped spans of positions, which are not retrieved any more.
    """

    def __init__(
        self,
        n_head_kv: int,
        head_size: int,
        *,
        cache_dtype: npt.DTypeLike = np.float32,
        score_dtype: npt.DTypeLike = np.float32,
        keep_all: bool = False,
        n_queries: int = 0,
        has_archive: bool = False,
        archive_rounding: Rounding = as_float16,
    ) -> None:
        self.keep_all = keep_all
        self.archive = None
        if has_archive:
            self.archive = LayerArchive(n_head_kv, head_size, rounding=archive_rounding)
        self.keys: FloatArray = np.empty((n_head_kv, 0, head_size), dtype=cache_dtype)
        self.values: FloatArray = np.empty((n_head_kv, 0, head_size), dtype=cache_dtype)
        self.row_positions: IntArray = np.empty((n_head_kv, 0), dtype=np.int64)
        self.rotary_positions: IntArray = np.empty((n_head_kv, 0), dtype=np.int64)
        self.row_scores: FloatArray = np.empty((n_head_kv, 0), dtype=score_dtype)
        self.row_squares: FloatArray = np.empty((n_head_kv, 0), dtype=score_dtype)
        self.evicted: BoolArray = np.empty((n_head_kv, 0), dtype=np.bool_)
        self.queries = LastQueries(n_queries)
        self.dropped: tuple[Span, ...] = ()

    @property
    def n_head_kv(self) -> int:
        """Number of KV heads."""
        return len(self.row_positions)

    @property
    def n_rows(self) -> int:
        """Rows in use of each KV head, the same number for all."""
        return int(np.count_nonzero(~self.evicted[0]))

    def positions(self, head: int) -> IntArray:
        """Return [n_rows] token positions of the rows in use of one KV head, ascending."""
        positions: IntArray = self.row_positions[head, ~self.evicted[head]]
        return positions

    def scores(self, head: int) -> FloatArray:
        """Return [n_rows] scores of the rows in use of one KV head, ordered by position."""
        scores: FloatArray = self.row_scores[head, ~self.evicted[head]]
        return scores

    def append(
        self,
        keys: FloatArray,
        values: FloatArray,
        positions: IntArray,
        rotary_positions: IntArray | None = None,
    ) -> None:
        """Write the rows of a chunk of new tokens; their scores start at zero.

        Args:
            keys, values: [n_head_kv, n_tokens, head_size], rounded here to the cache's type.
            positions: [n_tokens] ascending, above all stored positions.
            rotary_positions: [n_tokens] that the keys are rotated to; None: the same.
        """
        if rotary_positions is None:
            rotary_positions = positions
        shape = keys.shape[:2]
        new_keys, new_values = keys.astype(self.keys.dtype), values.astype(self.values.dtype)
        self.keys = np.concatenate([self.keys, new_keys], axis=1)
        self.values = np.concatenate([self.values, new_values], axis=1)
        self.row_positions = np.concatenate(
            [self.row_positions, np.broadcast_to(positions, shape)], axis=1
        )
        self.rotary_positions = np.concatenate(
            [self.rotary_positions, np.broadcast_to(rotary_positions, shape)], axis=1
        )
        zeros = np.zeros(shape, dtype=self.row_scores.dtype)
        self.row_scores = np.concatenate([self.row_scores, zeros], axis=1)
        self.row_squares = np.concatenate([self.row_squares, zeros], axis=1)
        self.evicted = np.concatenate([self.evicted, np.zeros(shape, dtype=np.bool_)], axis=1)

    def visible(self, query_positions: IntArray) -> BoolArray:
        """Return [n_head_kv, n_queries, n_stored] rows in use that are not in a query's future."""
        causal = self.row_positions[:, None, :] <= query_positions[None, :, None]
        return causal & ~self.evicted[:, None, :]

    def hidden(self, head: int) -> IntArray:
        """Return [n] archived positions that one KV head lacks, except dropped ones; ascending.

        Their number is the same for all heads, unless a head holds dropped rows.
        """
        archived = np.arange(self.archive.n_positions if self.archive else 0)
        archived = archived[~in_spans(archived, self.dropped)]
        return archived[~np.isin(archived, self.positions(head))]

    def record_queries(
        self, queries: FloatArray, positions: IntArray, rotary_positions: IntArray
    ) -> None:
        """Keep as many of the last queries as the policy needs.

        Args:
            queries: [n_head, n_tokens, head_size], rotated.
            positions, rotary_positions: [n_tokens].
        """
        self.queries.record(queries, positions, rotary_positions)

    def queries_of(self, head: int) -> FloatArray:
        """Return [n_queries, group, head_size] the queries of one KV head."""
        queries = self.queries.rotated
        group = len(queries) // self.n_head_kv
        of_head: FloatArray = queries[head * group : (head + 1) * group].swapaxes(0, 1)
        return of_head

    def query_attention(self) -> FloatArray:
        """Return recorded queries' attention to rows in use, [n_head_kv, n_queries, n_stored]."""
        if self.queries.positions.size == 0:
            return np.zeros((self.n_head_kv, 0, self.row_positions.shape[1]))
        queries = self.queries.rotated
        visible = self.visible(self.queries.positions)
        probabilities = attention_probabilities(queries, self.keys.astype(queries.dtype), visible)
        return mean_of_groups(probabilities, self.n_head_kv)

    def add_scores(self, collected: FloatArray) -> None:
        """Add [n_head_kv, n_stored] attention to the scores, which rows keep until they are
        evicted.
        """
        self.row_scores += collected

    def add_squares(self, collected: FloatArray) -> None:
        """Add [n_head_kv, n_stored] squared attention."""
        self.row_squares += collected

    def set_scores(self, scores: Sequence[FloatArray]) -> None:
        """Replace the scores of the rows in use, [n_rows] for each KV head."""
        for head, of_head in enumerate(scores):
            self.row_scores[head, ~self.evicted[head]] = of_head

    def decay(self, factor: float) -> None:
        """Multiply all collected sums."""
        self.row_scores *= self.row_scores.dtype.type(factor)
        self.row_squares *= self.row_squares.dtype.type(factor)

    def keep(self, kept: Sequence[IntArray]) -> None:
        """Evict all other rows.

        Args:
            kept: for each KV head [n_kept] indices into its rows in use, ascending; the same number
                each.
        """
        rows = [np.flatnonzero(~self.evicted[head])[of_head] for head, of_head in enumerate(kept)]
        self.evicted[:] = True
        for head, of_head in enumerate(rows):
            self.evicted[head, of_head] = False
        if self.keep_all:
            return
        self._gather(np.stack(rows))

    def archive_until(self, end: int, shift: int, rotate: Rotate) -> None:
        """Archive the rows of positions below `end` that the archive lacks.

        Rows dropped before that are archived as zeros.

        Args:
            end: a position; every KV head still has the rows before it that the archive lacks.
            shift: positions by which the text has been moved back so far.
            rotate: rotates keys.
        """
        if self.archive is None or end <= self.archive.n_positions:
            return
        first = self.archive.n_positions
        is_new = (self.row_positions >= first) & (self.row_positions < end)
        is_new &= ~in_spans(self.row_positions, self.dropped)
        rows = np.stack([np.flatnonzero(of_head) for of_head in is_new])
        positions = np.take_along_axis(self.row_positions, rows, axis=1)
        rotary = np.take_along_axis(self.rotary_positions, rows, axis=1)
        # From them to the end of the text no row is missing, so no re-base has had to pack them.
        assert (rotary == positions - shift).all()
        shape = (self.n_head_kv, end - first, self.keys.shape[-1])
        keys, values = np.zeros(shape, self.keys.dtype), np.zeros(shape, self.values.dtype)
        places = (positions - first)[:, :, None]
        np.put_along_axis(
            keys, places, np.take_along_axis(self.keys, rows[:, :, None], axis=1), axis=1
        )
        np.put_along_axis(
            values, places, np.take_along_axis(self.values, rows[:, :, None], axis=1), axis=1
        )
        self.archive.append(keys, values, shift, rotate)

    def restore(self, positions: IntArray, shift: int, rotate: Rotate) -> bool:
        """Restore archived rows in heads that lack them; a compaction must follow.

        They keep their distance to the text if positions last: :meth:`rebase` gives each its own
        position. Their collected sums are 0.

        Args:
            positions: [n] ascending; those that the archive lacks are ignored.
            shift: positions by which the text has been moved back so far.
            rotate: rotates keys.

        Returns:
            Whether a head lacked one.
        """
        if self.archive is None:
            return False
        positions = positions[positions < self.archive.n_positions]
        held = np.stack([np.isin(positions, self.positions(h)) for h in range(self.n_head_kv)])
        # A head that has a row which another head lacks gets an unused second copy.
        new = positions[~held.all(axis=0)]
        rotary = np.maximum(new - shift, 0)
        turned = rotate(self.archive.keys[:, new].astype(np.float64), rotary - new % N_PAGE)
        n_before = self.keys.shape[1]
        self.append(turned, self.archive.values[:, new], new, rotary)
        self.evicted[:, n_before:] = held[:, ~held.all(axis=0)]
        self._gather(np.argsort(self.row_positions, axis=1, kind="stable"))
        return new.size > 0

    def rebase(self, back: int, rotate: Rotate, next_position: int) -> None:
        """Rotate the keys in use, and the queries, `back` positions back.

        Keys that would get a position below 0 are packed at the start, in text order, at different
        positions.

        Args:
            back: positions.
            rotate: rotates [n_heads, n, head_size] by [n] positions.
            next_position: the next token's rotary position after the re-base.
        """
        for head in range(self.n_head_kv):
            in_use = np.flatnonzero(~self.evicted[head])
            before = self.rotary_positions[head, in_use]
            order = np.arange(in_use.size)
            room = np.maximum.accumulate(np.maximum(before - back - order, 0))
            after = order + np.minimum(room, next_position - in_use.size)
            keys = self.keys[head, in_use].astype(np.float64)
            turned = rotate(keys[None], after - before)[0]
            self.keys[head, in_use] = turned.astype(self.keys.dtype)
            self.rotary_positions[head, in_use] = after
        self.queries.rebase(back, rotate)

    def remove(self, first_position: int) -> None:
        """Drop all rows and queries of positions >= `first_position`; the scores of others stay."""
        n_kept = np.count_nonzero(self.row_positions < first_position, axis=1)
        if n_kept.min() != n_kept.max():
            raise ValueError(f"the KV heads do not keep the same rows from {first_position} on")
        self._gather(np.broadcast_to(np.arange(n_kept[0]), (self.n_head_kv, n_kept[0])))
        self.queries.remove(first_position)

    def _gather(self, rows: IntArray) -> None:
        """Gather [n_head_kv, n_kept] rows per KV head, and drop the others."""
        self.keys = np.take_along_axis(self.keys, rows[:, :, None], axis=1)
        self.values = np.take_along_axis(self.values, rows[:, :, None], axis=1)
        self.row_positions = np.take_along_axis(self.row_positions, rows, axis=1)
        self.rotary_positions = np.take_along_axis(self.rotary_positions, rows, axis=1)
        self.row_scores = np.take_along_axis(self.row_scores, rows, axis=1)
        self.row_squares = np.take_along_axis(self.row_squares, rows, axis=1)
        self.evicted = np.take_along_axis(self.evicted, rows, axis=1)
