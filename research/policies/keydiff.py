"""KeyDiff: the keys that differ most from the others.

pyh2o generate --policy research/policies/keydiff.py:KeyDiff
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pyh2o.policies import FloatArray, HeadRows, Need, Policy


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keeps the rows whose keys point away from the mean direction of all keys.

    Source: Park et al., "KeyDiff: key similarity-based KV cache eviction for long-context LLM
    inference in resource-constrained environments", 2025 (https://arxiv.org/abs/2504.15364);
    NVIDIA/kvpress, `kvpress/presses/keydiff_press.py`.

    Needs no attention; a compaction reads all keys once. Worse than sinks and a window in
    docs/measurements/quality.md.

    Deviations: recent rows are safe. The mean is over all rows, including those that do not
    compete, as in kvpress. A key of zeros has no direction: it adds nothing to the mean, and its
    score is 0.
    """

    needs: ClassVar[tuple[Need, ...]] = ("keys",)

    def score(self, rows: HeadRows) -> FloatArray:
        keys = rows.keys.astype(np.float64)
        directions = _unit(keys)
        cosines: FloatArray = directions @ _unit(directions.mean(axis=0))
        return -cosines


def _unit(vectors: FloatArray) -> FloatArray:
    """Return vectors [..., d] of length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: FloatArray = vectors / np.where(lengths > 0, lengths, 1)
    return unit
