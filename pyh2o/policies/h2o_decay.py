"""H2O that forgets old attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import FloatArray, HeadRows, Policy, parameter


@dataclass(frozen=True)
class H2ODecay(Policy):
    """Keeps the rows that collected most attention, where attention of long ago counts for less.

    At each compaction, after the choice, all sums are multiplied by 0.5 ** (m / half_life), with m
    the tokens since the compaction before, or since the start of the text.

    Source: `h2o` with exponential forgetting, as other implementations have it
    (rajveer43/VeloxQuant-MLX: 0.98 per token).

    Needs what `h2o` needs; the multiplication is part of a compaction.

    Deviations: from the paper, which never forgets. The steps are those of the compactions:
    attention of the tokens since the last one counts in full. With slack 1 that is every token.

    Attributes:
        half_life: tokens after which attention counts for half.
    """

    name: ClassVar[str] = "h2o-decay"
    needs_attention: ClassVar[bool] = True

    half_life: float = parameter(256.0, least=0, above=True)

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.attention
