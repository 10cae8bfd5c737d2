"""RoCo: mean attention, and a guard for rows whose attention varies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .base import SAFE_SCORE, FloatArray, HeadRows, Need, Policy, parameter


@dataclass(frozen=True)
class RoCo(Policy):
    """Keeps the rows whose attention varies most, and then those with the highest mean attention.

    A row that few queries look at, but those hard, has a low mean and a high standard deviation: it
    may be looked at again.

    Source: Ren and Zhu, "On the efficacy of eviction policy for key-value constrained generative
    language model inference", 2024 (https://arxiv.org/abs/2402.06262); DRSY/EasyKV,
    `easykv/easykv.py`, policy `roco`.

    Needs two sums per row, of the attention and of its square, added to at every query.

    Deviations: EasyKV guards a share of the whole budget, among which it counts the newest 10 rows;
    here all recent rows are safe anyway, and the share is of the places that are left. It evicts
    the lowest mean among the rows of low deviation, one for each token, which is the same rule. It
    squares the mean over the group; here it is the mean of the squares. It counts queries with a
    counter per row, here they follow from the position (see `h2o-mean`).

    Attributes:
        guard: share of the places that go to the highest deviations.
    """

    needs: ClassVar[tuple[Need, ...]] = ("attention", "squares")

    guard: float = parameter(0.3, least=0, most=1)

    def score(self, rows: HeadRows) -> FloatArray:
        mean = rows.attention / rows.ages
        # Rounding can make the variance of equal numbers negative.
        deviation = np.sqrt(np.maximum(0, rows.squares / rows.ages - mean**2))
        scores: FloatArray = mean.copy()
        scores[rows.best(deviation, math.floor(self.guard * rows.n_places))] = SAFE_SCORE
        return scores
