"""The rows of one layer: every KV head keeps its own set, and all sets have the same size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .eviction import EvictionParameters, margin, select

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class LayerCache:
    """K and V rows of one layer, with the token position and the score of each.

    Rows lie in ascending order of position. They hold rotated keys, so nothing has to be recomputed
    when rows between them go; :meth:`rebase` rotates them to other positions.

    `keep_all=True` is the other way to evict, far too large for use but right by construction:
    no row is ever dropped, evicted ones are only hidden from all later queries. Both ways must
    give the same outputs.

    Attributes:
        keys, values: [n_head_kv, n_stored, head_size].
        row_positions: [n_head_kv, n_stored] token positions.
        rotary_positions: [n_head_kv, n_stored] positions the keys are rotated to.
        row_scores: [n_head_kv, n_stored] attention collected.
        evicted: [n_head_kv, n_stored] rows that no query may see; all false unless `keep_all`.
    """

    def __init__(
        self,
        n_head_kv: int,
        head_size: int,
        *,
        cache_dtype: npt.DTypeLike = np.float32,
        score_dtype: npt.DTypeLike = np.float32,
        keep_all: bool = False,
    ) -> None:
        self.keep_all = keep_all
        self.keys: FloatArray = np.empty((n_head_kv, 0, head_size), dtype=cache_dtype)
        self.values: FloatArray = np.empty((n_head_kv, 0, head_size), dtype=cache_dtype)
        self.row_positions: IntArray = np.empty((n_head_kv, 0), dtype=np.int64)
        self.rotary_positions: IntArray = np.empty((n_head_kv, 0), dtype=np.int64)
        self.row_scores: FloatArray = np.empty((n_head_kv, 0), dtype=score_dtype)
        self.evicted: BoolArray = np.empty((n_head_kv, 0), dtype=np.bool_)

    @property
    def n_rows(self) -> int:
        """Rows in use, the same number for every KV head."""
        return int(np.count_nonzero(~self.evicted[0]))

    def positions(self, head: int) -> IntArray:
        """[n_rows] token positions of the rows in use of one KV head, ascending."""
        positions: IntArray = self.row_positions[head, ~self.evicted[head]]
        return positions

    def scores(self, head: int) -> FloatArray:
        """[n_rows] scores of the rows in use of one KV head, ordered by position."""
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
            positions: [n_tokens] ascending, above all positions stored.
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
        self.row_scores = np.concatenate(
            [self.row_scores, np.zeros(shape, dtype=self.row_scores.dtype)], axis=1
        )
        self.evicted = np.concatenate([self.evicted, np.zeros(shape, dtype=np.bool_)], axis=1)

    def visible(self, query_positions: IntArray) -> BoolArray:
        """[n_head_kv, n_queries, n_stored] rows in use that are not in a query's future."""
        causal = self.row_positions[:, None, :] <= query_positions[None, :, None]
        return causal & ~self.evicted[:, None, :]

    def add_scores(self, collected: FloatArray) -> None:
        """Add [n_head_kv, n_stored] attention to the scores. A row keeps its sum while it lives."""
        self.row_scores += collected

    def compact(self, parameters: EvictionParameters) -> float:
        """Keep the pinned, recent and heavy rows of every KV head and evict all others.

        Returns:
            The smallest :func:`~pyh2o.reference.eviction.margin` among the heads.
        """
        kept_rows = []
        smallest = float("inf")
        for head in range(self.row_positions.shape[0]):
            in_use = np.flatnonzero(~self.evicted[head])
            scores, positions = self.row_scores[head, in_use], self.row_positions[head, in_use]
            kept = select(
                scores,
                positions,
                pinned=parameters.pinned,
                heavy=parameters.heavy,
                recent=parameters.recent,
            )
            smallest = min(
                smallest,
                margin(scores, positions, kept, pinned=parameters.pinned, recent=parameters.recent),
            )
            kept_rows.append(in_use[kept])

        # Every head fills the same budget, so every head keeps as many.
        rows = np.stack(kept_rows)
        if self.keep_all:
            self.evicted[:] = True
            np.put_along_axis(self.evicted, rows, False, axis=1)
        else:
            self._keep(rows)
        return smallest

    def rebase(self, back: int, rotate: Callable[[FloatArray, IntArray], FloatArray]) -> None:
        """Rotate the keys in use `back` positions back.

        Those that would get a position below 0 are packed at the start, in the order of the text.

        Args:
            back: positions.
            rotate: turns keys [n_rows, head_size] by [n_rows] positions.
        """
        for head in range(self.row_positions.shape[0]):
            in_use = np.flatnonzero(~self.evicted[head])
            before = self.rotary_positions[head, in_use]
            after = np.maximum(np.arange(in_use.size), before - back)
            keys = self.keys[head, in_use].astype(np.float64)
            self.keys[head, in_use] = rotate(keys, after - before).astype(self.keys.dtype)
            self.rotary_positions[head, in_use] = after

    def remove(self, first_position: int) -> None:
        """Drop all rows of positions >= `first_position`; the scores of the others stay."""
        n_kept = np.count_nonzero(self.row_positions < first_position, axis=1)
        if n_kept.min() != n_kept.max():
            raise ValueError(f"the KV heads do not keep the same rows from {first_position} on")
        n_head_kv = self.row_positions.shape[0]
        self._keep(np.broadcast_to(np.arange(n_kept[0]), (n_head_kv, n_kept[0])))

    def _keep(self, rows: IntArray) -> None:
        """Gather [n_head_kv, n_kept] rows, per KV head; drop the others."""
        self.keys = np.take_along_axis(self.keys, rows[:, :, None], axis=1)
        self.values = np.take_along_axis(self.values, rows[:, :, None], axis=1)
        self.row_positions = np.take_along_axis(self.row_positions, rows, axis=1)
        self.rotary_positions = np.take_along_axis(self.rotary_positions, rows, axis=1)
        self.row_scores = np.take_along_axis(self.row_scores, rows, axis=1)
        self.evicted = np.take_along_axis(self.evicted, rows, axis=1)
