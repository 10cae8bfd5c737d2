"""H2O that looks from afar."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..errors import SettingsError
from .base import FloatArray, HeadRows, Policy, parameter

# A cache that keeps more rows can remember for longer: measured at 256 and at 1,600 rows.
TOKENS_PER_ROW = 1.5


@dataclass(frozen=True)
class H2OFar(Policy):
    """Keeps the rows that collect most attention from afar, per query that could pay it.

    Nearly every token is attended to by the few that follow it. That says little about whether it
    will be needed again, but it is most of what a young row has collected, so that young rows take
    the places of others. Attention from less than `near` tokens away therefore does not count here.
    The rest is averaged over the queries that could see the row from afar, and attention of long
    ago counts for less, in the sum and in the number of queries alike.

    Source: our own, found by measuring; `h2o-mean` without what is near, and with the forgetting of
    `h2o-decay`, but token by token. In docs/measurements/quality.md it is compared with all others.

    Needs what `h2o` needs, and for every query one weight per row, the same for all layers and
    heads.

    Deviations: none from a paper. `near` is at most the recent window. Where a tail was removed and
    said again, rows that were not recent any more at the last compaction count as far away.

    Attributes:
        near: tokens.
        half_life: tokens after which attention counts for half; 0 for `TOKENS_PER_ROW` times the
            rows that are kept.
    """

    name: ClassVar[str] = "h2o-far"
    needs_attention: ClassVar[bool] = True

    near: int = parameter(64, least=1)
    half_life: float = parameter(0.0, least=0)

    @property
    def n_near(self) -> int:
        return self.near

    def for_budget(self, rows: int) -> H2OFar:
        return self if self.half_life > 0 else replace(self, half_life=TOKENS_PER_ROW * rows)

    def score(self, rows: HeadRows) -> FloatArray:
        if self.half_life == 0:
            raise SettingsError("h2o-far: half_life is open: for_budget() closes it")
        rate = math.log(2) / self.half_life
        n_far = np.maximum(rows.ages - min(self.near, rows.n_recent), 1)
        mean: FloatArray = rows.attention * np.expm1(-rate) / np.expm1(-n_far * rate)
        return mean
