"""Expected Attention: scores rows by the attention expected of future queries.

pyh2o generate --policy research/policies/expected.py:Expected
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pyh2o.errors import PolicyError
from pyh2o.policies import FloatArray, HeadRows, Need, Policy, parameter
from pyh2o.policies.base import LARGEST_COUNT

ComplexArray = npt.NDArray[np.complexfloating[Any, Any]]


@dataclass(frozen=True)
class Expected(Policy):
    """Keeps the rows with the highest expected attention of the next queries, weighted by values.

    Future queries are assumed to resemble the last ones at later positions: each of the last
    queries is rotated to the mean of its rotations at the next `horizon` positions. The mean of the
    results, and with `covariance` their spread, give the expected logits; their softmax, plus
    `epsilon`, times the norm of a row's value is its score.

    Source: Devoto et al., "Expected attention: KV cache compression by estimating attention from
    future queries distribution", 2025 (https://arxiv.org/abs/2510.00636); NVIDIA/kvpress,
    `kvpress/presses/expected_attention_press.py`.

    Needs the last queries of each head. A compaction costs a dot product per row and query head,
    and with `covariance` one per row and query.

    Deviations: positions are the true ones (kvpress, while generating, counts them from the length
    of its buffer). It skips the first 4 queries of its buffer; here all count. The mean and the
    spread are of the rotated queries, which is equivalent to rotating the mean and spread of
    unrotated ones. Sinks are only safe if they are pinned; pinned rows are left out of the softmax,
    recent ones are not. Without queries (the tail of the text was removed) all rows score 0.

    Attributes:
        queries: last queries that count; the recent window may have fewer.
        horizon: positions ahead.
        epsilon: attention that every row gets in addition.
        covariance: whether the spread of the queries counts.
    """

    needs: ClassVar[tuple[Need, ...]] = ("queries", "keys", "value_norms")

    queries: int = parameter(128, least=1, most=LARGEST_COUNT)
    horizon: int = parameter(512, least=1, most=LARGEST_COUNT)
    epsilon: float = parameter(0.02, least=0, most=1)
    covariance: bool = parameter(False)

    @property
    def n_queries(self) -> int:
        return self.queries

    def score(self, rows: HeadRows) -> FloatArray:
        if rows.queries.shape[0] == 0:
            return np.zeros(rows.positions.size)
        queries = self._rotated_ahead(rows)
        keys = rows.keys.astype(np.float64)
        # [n_queries, group, n]; the products are linear, so their mean is the mean query's.
        products = queries @ keys.T
        logits = products.mean(axis=0) * rows.scale
        if self.covariance:
            # k^T Sigma k is the variance of the products, without the d x d matrix.
            logits += products.var(axis=0) * rows.scale**2 / 2
        logits[:, rows.pinned] = -np.inf
        attention = _softmax(logits).mean(axis=0)
        scores: FloatArray = (attention + self.epsilon) * rows.value_norms.astype(np.float64)
        return scores

    def _rotated_ahead(self, rows: HeadRows) -> FloatArray:
        """Return [n_queries, group, head_size] the mean of each query over the positions ahead."""
        if rows.rope_frequencies.size == 0:
            raise PolicyError(
                f"{self.name}: the rotation of this model's keys is unknown: use another policy"
            )
        # In float64: at high positions float32 would lose the fraction of an angle.
        frequencies = rows.rope_frequencies.astype(np.float64)
        ahead = rows.newest + 1 - rows.query_positions
        rotations = np.exp(1j * ahead[:, None] * frequencies) * _mean_rotation(
            frequencies, self.horizon
        )
        rotated = _as_complex(rows.queries) * rotations[:, None]
        pairs = np.stack([rotated.real, rotated.imag], axis=-1)
        return pairs.reshape(rows.queries.shape)


def _mean_rotation(frequencies: FloatArray, horizon: int) -> ComplexArray:
    """Return [head_size / 2] the mean of exp(i * frequency * t) over t = 0 .. horizon - 1.

    High frequencies come near 0, low ones stay near 1.
    """
    halves = np.where(frequencies == 0, 1, frequencies / 2)
    shrinking = np.sin(horizon * halves) / (horizon * np.sin(halves))
    shrinking = np.where(frequencies == 0, 1, shrinking)
    rotation: ComplexArray = shrinking * np.exp(1j * (horizon - 1) / 2 * frequencies)
    return rotation


def _as_complex(x: FloatArray) -> ComplexArray:
    """Convert [..., head_size] to [..., head_size / 2]: neighbouring elements are one pair."""
    x = x.astype(np.float64)
    pairs: ComplexArray = x[..., 0::2] + 1j * x[..., 1::2]
    return pairs


def _softmax(logits: FloatArray) -> FloatArray:
    """Return the softmax over the last axis."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: FloatArray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities
