"""Attention over the kept rows, and the score that it adds to them.

H2O's score of a row is the attention it has collected: the softmax probabilities that all queries
since it was written, its own included, gave to it. With grouped-query attention (GQA) several
query heads share one row, and the row's score is the mean of their probabilities (the paper knows
one query head per KV head; there the mean is that head). So one query adds one unit of score to
each KV head, shared out among the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def attend(
    queries: FloatArray, keys: FloatArray, values: FloatArray, visible: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """Scaled dot-product attention with grouped query heads.

    Query heads g * (n_head / n_head_kv) and following use KV head g.

    Args:
        queries: [n_head, n_queries, head_size], rotated.
        keys: [n_head_kv, n_rows, head_size], rotated.
        values: [n_head_kv, n_rows, head_size].
        visible: [n_head_kv, n_queries, n_rows] the rows a query may attend; at least one each.

    Returns:
        outputs [n_head, n_queries, head_size] and probabilities [n_head, n_queries, n_rows].
    """
    n_head, n_queries, head_size = queries.shape
    n_head_kv, n_rows, _ = keys.shape
    group = n_head // n_head_kv
    grouped = queries.reshape(n_head_kv, group, n_queries, head_size)

    logits = grouped @ keys[:, None].swapaxes(-1, -2) / keys.dtype.type(np.sqrt(head_size))
    logits = np.where(visible[:, None], logits, -np.inf)
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    outputs = probabilities @ values[:, None]
    return (
        outputs.reshape(n_head, n_queries, head_size),
        probabilities.reshape(n_head, n_queries, n_rows),
    )


def collected_attention(probabilities: FloatArray, n_head_kv: int) -> FloatArray:
    """The score that one chunk of queries adds to each row.

    Args:
        probabilities: [n_head, n_queries, n_rows] from :func:`attend`.
        n_head_kv: number of KV heads; divides n_head.

    Returns:
        [n_head_kv, n_rows] sum over the queries, mean over the query heads of each KV group.
    """
    n_head, n_queries, n_rows = probabilities.shape
    grouped = probabilities.reshape(n_head_kv, n_head // n_head_kv, n_queries, n_rows)
    collected: FloatArray = grouped.mean(axis=1).sum(axis=1)
    return collected
