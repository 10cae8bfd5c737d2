"""The archive of one layer: what has left the recent window, to be fetched back from.

Source: our own. A token's rows are written once, when it leaves the recent window: until then every
KV head still has them, whatever the policy keeps later. So the archive is a contiguous range of
positions from the start of the text on, and nothing is ever taken from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .queries import LastQueries

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

Rotate = Callable[[FloatArray, IntArray], FloatArray]  # [n_heads, n, head_size] by [n] positions
Rounding = Callable[[FloatArray], FloatArray]  # rows [..., head_size] to what a type can hold


def as_float32(rows: FloatArray) -> FloatArray:
    """No rounding of float32 rows."""
    return rows.astype(np.float32)


def as_float16(rows: FloatArray) -> FloatArray:
    """What an archive of half floats holds."""
    return rows.astype(np.float16)


class LayerArchive:
    """K and V rows of positions 0 .. n_positions - 1 of one layer, for all KV heads.

    The key of position p is rotated to p - shift, where shift is that of the text when it came.

    Attributes:
        keys, values: [n_head_kv, n_positions, head_size], rounded.
        shifts: [n_positions].
        queries: the last ones, which recall asks for.
    """

    def __init__(
        self,
        n_head_kv: int,
        head_size: int,
        *,
        n_queries: int,
        rounding: Rounding = as_float16,
    ) -> None:
        self._rounding = rounding
        empty = np.empty((n_head_kv, 0, head_size), dtype=np.float64)
        self.keys, self.values = rounding(empty), rounding(empty)
        self.shifts: IntArray = np.empty(0, dtype=np.int64)
        self.queries = LastQueries(n_queries)

    @property
    def n_positions(self) -> int:
        """Positions in the archive; the first that it lacks."""
        return self.shifts.size

    def append(self, keys: FloatArray, values: FloatArray, shift: int) -> None:
        """Write the rows [n_head_kv, n, head_size] of the next n positions; shift as above."""
        self.keys = np.concatenate([self.keys, self._rounding(keys)], axis=1)
        self.values = np.concatenate([self.values, self._rounding(values)], axis=1)
        self.shifts = np.concatenate([self.shifts, np.full(keys.shape[1], shift)])

    def keys_at(
        self, head: int, positions: IntArray, places: IntArray, rotate: Rotate
    ) -> FloatArray:
        """[n, head_size] float64 keys of [n] positions, rotated to [n] places."""
        turns = places - (positions - self.shifts[positions])
        keys: FloatArray = rotate(self.keys[head, positions].astype(np.float64)[None], turns)[0]
        return keys

    def values_of(self, head: int, positions: IntArray) -> FloatArray:
        """[n, head_size] values of [n] positions."""
        values: FloatArray = self.values[head, positions]
        return values
