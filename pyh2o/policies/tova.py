"""TOVA: the attention of the last query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import FloatArray, HeadRows, Need, Policy


@dataclass(frozen=True)
class TOVA(Policy):
    """Keeps the rows that the last query pays most attention to.

    Source: Oren et al., "Transformers are multi-state RNNs", 2024
    (https://arxiv.org/abs/2401.06104).

    Needs the last query of each head; a compaction computes its attention again. Nothing is
    collected between compactions.

    Deviations: the paper averages over all heads of a layer, so that they keep the same rows; here
    each KV head chooses by the mean over its own group. It protects only the newest row, here all
    recent rows are safe. If the tail of the text was removed and nothing was read since, the last
    query is not known: all rows score 0, and the newer ones stay.
    """

    needs: ClassVar[tuple[Need, ...]] = ("query_attention",)

    @property
    def n_queries(self) -> int:
        return 1

    def score(self, rows: HeadRows) -> FloatArray:
        return rows.query_attention
