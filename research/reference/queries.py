"""The last queries of a layer, to compute their attention later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


class LastQueries:
    """The last `n_most` queries of the text, fewer at first and after its tail was removed.

    Attributes:
        rotated: [n_head, n_queries, head_size].
        positions: [n_queries] of the text, ascending.
        rotary_positions: [n_queries] they are rotated to; can be negative after a re-base.
    """

    def __init__(self, n_most: int) -> None:
        self._n_most = n_most
        self.rotated: FloatArray = np.empty((0, 0, 0))
        self.positions: IntArray = np.empty(0, dtype=np.int64)
        self.rotary_positions: IntArray = np.empty(0, dtype=np.int64)

    def record(self, queries: FloatArray, positions: IntArray, rotary_positions: IntArray) -> None:
        """Add a chunk of new queries, and drop the oldest if there are too many.

        Args:
            queries: [n_head, n_tokens, head_size], rotated.
            positions, rotary_positions: [n_tokens].
        """
        if self.positions.size:
            queries = np.concatenate([self.rotated, queries], axis=1)
            positions = np.concatenate([self.positions, positions])
            rotary_positions = np.concatenate([self.rotary_positions, rotary_positions])
        first = max(0, positions.size - self._n_most)
        self.rotated = queries[:, first:]
        self.positions, self.rotary_positions = positions[first:], rotary_positions[first:]

    def remove(self, first_position: int) -> None:
        """Drop those of positions >= `first_position`."""
        stay = self.positions < first_position
        self.rotated = self.rotated[:, stay]
        self.positions = self.positions[stay]
        self.rotary_positions = self.rotary_positions[stay]

    def rebase(self, back: int, rotate: Callable[[FloatArray, IntArray], FloatArray]) -> None:
        """Rotate them `back` positions back. Unlike keys, none is packed at the start."""
        if not self.positions.size:
            return
        turned = rotate(self.rotated.astype(np.float64), np.full(self.positions.size, -back))
        self.rotated = turned.astype(self.rotated.dtype)
        self.rotary_positions = self.rotary_positions - back
