"""H2O with the mean attention in the place of the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import FloatArray, HeadRows, Policy


@dataclass(frozen=True)
class H2OMean(Policy):
    """Keeps the rows that collected most attention per query that could see them.

    A sum favours old rows, which more queries have seen; a mean is fair to all ages, and quick to
    give a young row a high place.

    Source: `h2o` with the denominator of ObservedAttention (NVIDIA/kvpress,
    `kvpress/presses/observed_attention_press.py`) and of cold-compress
    (AnswerDotAI/cold-compress, `cache.py`, class `KVCacheHeavyHitter`).

    Needs what `h2o` needs.

    Deviations: kvpress protects no recent rows; the paper (appendix B.2) reports that averaging did
    worse for it. Queries that saw a row are counted from its position, so a tail that was removed
    and said again is counted once, while its attention is in the sum twice.
    """

    name: ClassVar[str] = "h2o-mean"
    needs_attention: ClassVar[bool] = True

    def score(self, rows: HeadRows) -> FloatArray:
        mean: FloatArray = rows.attention / rows.ages
        return mean
