"""Attention over the kept rows, and what it adds to their scores.

H2O's score of a row is the attention it has collected: the softmax probabilities of all queries
since it was written, including its own. With grouped-query attention (GQA) several query heads
share one row, and the row's score is the mean of their probabilities (the paper has one query head
per KV head). So one query adds one unit of score to each KV head, distributed over the rows. Other
policies also need the squares of the probabilities, or those of a few queries at a later time.
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
    probabilities = attention_probabilities(queries, keys, visible)
    outputs = _grouped(probabilities, len(keys)) @ values[:, None]
    return outputs.reshape(queries.shape), probabilities


def attention_probabilities(
    queries: FloatArray, keys: FloatArray, visible: BoolArray
) -> FloatArray:
    """Return each query's attention to each row, [n_head, n_queries, n_rows] (see :func:`attend`).

    The probabilities of a query sum to 1; rows that it may not attend to have 0.
    """
    logits = attention_logits(queries, keys, visible)
    probabilities: FloatArray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    return probabilities.reshape(*queries.shape[:2], -1)


def attention_logits(queries: FloatArray, keys: FloatArray, visible: BoolArray) -> FloatArray:
    """Return [n_head_kv, group, n_queries, n_rows] scaled products, -inf for invisible rows."""
    scale = keys.dtype.type(np.sqrt(queries.shape[-1]))
    logits = _grouped(queries, len(keys)) @ keys[:, None].swapaxes(-1, -2) / scale
    masked: FloatArray = np.where(visible[:, None], logits, -np.inf)
    return masked


def mean_of_groups(per_head: FloatArray, n_head_kv: int) -> FloatArray:
    """Average [n_head, n_queries, n_rows] to [n_head_kv, n_queries, n_rows]."""
    mean: FloatArray = _grouped(per_head, n_head_kv).mean(axis=1)
    return mean


def collected_attention(probabilities: FloatArray, n_head_kv: int) -> FloatArray:
    """Return the score that one chunk of queries adds to each row.

    Args:
        probabilities: [n_head, n_queries, n_rows] from :func:`attend`.
        n_head_kv: number of KV heads; divides n_head.

    Returns:
        [n_head_kv, n_rows] sum over the queries, mean over the query heads of each KV group.
    """
    collected: FloatArray = mean_of_groups(probabilities, n_head_kv).sum(axis=1)
    return collected


def collected_squares(probabilities: FloatArray, n_head_kv: int) -> FloatArray:
    """Return the same sums of squared probabilities, [n_head_kv, n_rows]."""
    return collected_attention(probabilities**2, n_head_kv)


def _grouped(per_head: FloatArray, n_head_kv: int) -> FloatArray:
    """Reshape [n_head, ...] to [n_head_kv, group, ...]."""
    return per_head.reshape(n_head_kv, -1, *per_head.shape[1:])
