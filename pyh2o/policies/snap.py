"""SnapKV, which goes by the attention of the last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .base import LARGEST_COUNT, FloatArray, HeadRows, Need, Policy, parameter


@dataclass(frozen=True)
class Snap(Policy):
    """Keeps the rows, with their neighbours, that the last queries pay most attention to.

    Source: Li et al., "SnapKV: LLM knows what you are looking for before generation", 2024
    (https://arxiv.org/abs/2404.14469); NVIDIA/kvpress, `kvpress/presses/snapkv_press.py`.

    Needs the last queries of each head; a compaction computes their attention again, queries x rows
    dot products. Nothing is collected between compactions.

    Deviations: the paper compresses a prompt once, by its last queries, here every compaction does.
    Its window of queries is protected, here the recent rows are, of which the queries are at most
    as many. The queries see the cache as it is, also themselves, and earlier ones not the later
    rows; kvpress leaves the window out of what is pooled, which is the same here: pooling runs over
    the competing rows only, neighbours in the order of the text as far as they are left. The edges
    are means over the neighbours there are (kvpress counts missing ones as zeros).

    `snap:queries=1,pool=1` is TOVA (Oren et al., "Transformers are multi-state RNNs", 2024,
    https://arxiv.org/abs/2401.06104), but that each KV head chooses by the mean over its own group,
    where the paper averages over all heads of a layer, and that all recent rows are safe.

    Attributes:
        queries: last queries that count; the recent window may have fewer.
        pool: neighbours that a score is the mean over, the row itself among them; odd.
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
    """[n] means over the `pool` neighbours around each; at the ends over those there are."""
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
