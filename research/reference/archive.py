"""The archive of one layer: rows that have left the recent window, for retrieval.

Source: our own. A token's rows are written once, when it leaves the recent window: until then every
KV head still has them, whatever the policy keeps later. So the archive is a contiguous range of
positions from the start of the text, and rows are never removed from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .codes import PageCodes, encode

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

Rotate = Callable[[FloatArray, IntArray], FloatArray]  # x [n_heads, n, head_size], positions [n]
Rounding = Callable[[FloatArray], FloatArray]  # rounds rows [..., head_size] to a type

N_PAGE = 128  # positions 128g .. 128g + 127 are a page: its keys are moved as a whole


def as_float32(rows: FloatArray) -> FloatArray:
    """Return float32 rows without rounding."""
    return rows.astype(np.float32)


def as_float16(rows: FloatArray) -> FloatArray:
    """Round as an archive of half floats does."""
    return rows.astype(np.float16)


class LayerArchive:
    """K and V rows of positions 0 .. n_positions - 1 of one layer, for all KV heads.

    The key of position p is rotated to p modulo N_PAGE, its position in its page, wherever it was
    rotated to before.

    Attributes:
        keys, values: [n_head_kv, n_positions, head_size], rounded.
    """

    def __init__(self, n_head_kv: int, head_size: int, *, rounding: Rounding = as_float16) -> None:
        self._rounding = rounding
        empty = np.empty((n_head_kv, 0, head_size), dtype=np.float64)
        self.keys, self.values = rounding(empty), rounding(empty)
        # codes of all heads by page, with its number of rows and its place
        self._codes: dict[tuple[int, int, int], list[PageCodes]] = {}

    @property
    def n_positions(self) -> int:
        """Number of archived positions; the first missing one."""
        return int(self.keys.shape[1])

    def append(self, keys: FloatArray, values: FloatArray, shift: int, rotate: Rotate) -> None:
        """Write the rows [n_head_kv, n, head_size] of the next n positions.

        Args:
            keys: rotated to their positions minus `shift`.
            values: of the same positions.
            shift: positions by which the text has been moved back so far.
            rotate: rotates keys.
        """
        positions = self.n_positions + np.arange(keys.shape[1])
        turned = rotate(keys.astype(np.float64), positions % N_PAGE - (positions - shift))
        self.keys = np.concatenate([self.keys, self._rounding(turned)], axis=1)
        self.values = np.concatenate([self.values, self._rounding(values)], axis=1)

    def places(self, shift: int) -> IntArray:
        """Return [n_pages] rotary positions of the first position of each page.

        They keep their distance to the text while positions last; older pages are at the start.

        Args:
            shift: positions by which the text has been moved back so far.
        """
        return np.maximum(np.arange(0, self.n_positions, N_PAGE) - shift, 0)

    def keys_at(self, head: int, positions: IntArray, shift: int, rotate: Rotate) -> FloatArray:
        """Return [n, head_size] keys of [n] positions, rotated to the places of their pages."""
        turns = self.places(shift)[positions // N_PAGE]
        keys: FloatArray = rotate(self.keys[head, positions].astype(np.float64)[None], turns)[0]
        return keys

    def codes(self, head: int, shift: int, rotate: Rotate) -> list[PageCodes]:
        """Return [n_pages] codes of the keys of one KV head, rotated to the places of their pages.

        The codes of a page depend on its rows and its place: they are computed again when it gets
        more rows or moves.

        Args:
            head: KV head.
            shift: positions by which the text has been moved back so far.
            rotate: rotates keys.
        """
        known, self._codes = self._codes, {}
        for page, place in enumerate(self.places(shift).tolist()):
            rows = np.arange(page * N_PAGE, min((page + 1) * N_PAGE, self.n_positions))
            of = (page, rows.size, place)
            self._codes[of] = known.get(of) or [
                encode(self.keys_at(of_head, rows, shift, rotate))
                for of_head in range(len(self.keys))
            ]
        return [of_heads[head] for of_heads in self._codes.values()]
