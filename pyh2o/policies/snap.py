"""SnapKV: score rows by the attention of the last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .base import LARGEST_COUNT, FloatArray, HeadRows, Need, Policy, parameter


@dataclass(frozen=True)
class Snap(Policy):
    """Keeps the rows, with their neighbours, that the last queries attend to most.

    Source: Li et al., "SnapKV: LLM knows what you are looking for before generation", 2024
    (https://arxiv.org/abs/2404.14469); NVIDIA/kvpress, `kvpress/presses/snapkv_press.py`.

    Cost: the last queries of each head are stored; a compaction computes queries x rows dot
    products. Nothing is collected between compactions.

    Deviations: the paper compresses a prompt once, here every compaction selects rows. The paper
    protects the window of queries, here the recent rows are protected and include the queries. The
    queries attend causally to the cached rows, including their own. As in kvpress, pooling excludes
    the window: it covers competing rows only, with their nearest remaining neighbours. At the
    edges, it averages over existing neighbours (kvpress counts missing ones as zeros).

    `snap:queries=1,pool=1` is TOVA (Oren et al., "Transformers are multi-state RNNs", 2024,
    https://arxiv.org/abs/2401.06104), except that each KV head uses the mean over its own group
    (the paper averages over all heads of a layer), and that all recent rows are kept.

    Attributes:
        queries: number of last queries, limited by the recent window.
        pool: number of rows that a score is averaged over, centred on its own; odd.
    """

    needs: ClassVar[tuple[Need, ...]] = ("query_attention",)

    queries: int = parameter(32, least=1, most=LARGEST_COUNT)
    pool: int = parameter(5, least=1, most=LARGEST_COUNT, odd=True)

    @property
    def n_queries(self) -> int:
        return self.queries

    def score(self, rows: HeadRows) -> FloatArray:
        scores: FloatArray = rows.query_attention.astype(np.float64)
        scores[rows.competing] = _pooled(scores[rows.competing], self.pool)
        return scores


def _pooled(scores: FloatArray, pool: int) -> FloatArray:
    """Return [n] means over `pool` adjacent scores, fewer at the edges."""
    reach = min(pool // 2, scores.size)
    padded = np.pad(scores, reach)
    present = np.pad(np.ones(scores.size), reach)
    sums = np.zeros(scores.size)
    counts = np.zeros(scores.size)
    for shift in range(2 * reach + 1):
        sums += padded[shift : shift + scores.size]
        counts += present[shift : shift + scores.size]
    pooled: FloatArray = sums / counts
    return pooled
