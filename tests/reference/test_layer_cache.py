"""The cache of one layer on random queries, keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o.policies import H2O
from research.reference import (
    EvictionParameters,
    LayerCache,
    attend,
    collected_attention,
    compact,
)

FloatArray = npt.NDArray[np.floating[Any]]

N_HEAD_KV, HEAD_SIZE = 2, 8


class NaiveHead:
    """One KV head, implemented a second time: keeps every row and masks with -inf."""

    def __init__(self, parameters: EvictionParameters) -> None:
        self.parameters = parameters
        self.keys: list[FloatArray] = []
        self.values: list[FloatArray] = []
        self.scores: list[float] = []
        self.kept: list[int] = []

    def step(self, queries: FloatArray, keys: FloatArray, values: FloatArray) -> FloatArray:
        """Evaluate a chunk: queries [group, n, d], keys and values [n, d] to [group, n, d]."""
        n_tokens = len(keys)
        if len(self.kept) + n_tokens > self.parameters.capacity:
            self.compact()
        first = len(self.keys)
        self.kept += range(first, first + n_tokens)
        self.keys += list(keys)
        self.values += list(values)
        self.scores += [0.0] * n_tokens

        outputs = np.empty_like(queries)
        for i in range(n_tokens):
            for member, query in enumerate(queries[:, i]):
                logits = np.full(len(self.keys), -np.inf)
                for j in self.kept:
                    if j <= first + i:
                        logits[j] = query @ self.keys[j] / np.sqrt(query.size)
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                outputs[member, i] = weights @ np.array(self.values)
                for j in self.kept:
                    self.scores[j] += weights[j] / len(queries)
        return outputs

    def compact(self) -> None:
        """Evict the worst row repeatedly until the budget is met."""
        newest = len(self.keys) - 1
        while len(self.kept) > self.parameters.budget:
            loser = min(
                (
                    j
                    for j in self.kept
                    if self.parameters.pinned <= j <= newest - self.parameters.recent
                ),
                key=lambda j: (self.scores[j], j),
            )
            self.kept.remove(loser)


def compact_layer(cache: LayerCache, parameters: EvictionParameters) -> None:
    """Compact one layer; H2O ignores rotary embeddings."""
    compact([cache], parameters, H2O(), np.empty(0))


def evaluate(
    cache: LayerCache,
    parameters: EvictionParameters,
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    position: int,
) -> FloatArray:
    """Do what the model does with one layer: compact if needed, append, attend, add the scores.

    queries [n_head, n, d], keys and values [n_head_kv, n, d] to outputs [n_head, n, d].
    """
    n_head_kv, n_tokens, _ = keys.shape
    if cache.n_rows + n_tokens > parameters.capacity:
        compact_layer(cache, parameters)
        assert cache.n_rows == parameters.budget
    positions = np.arange(position, position + n_tokens)
    cache.append(keys, values, positions)
    outputs, probabilities = attend(queries, cache.keys, cache.values, cache.visible(positions))
    cache.add_scores(collected_attention(probabilities, n_head_kv))
    return outputs


@pytest.mark.parametrize("keep_all", [False, True])
@pytest.mark.parametrize(
    "parameters",
    [
        EvictionParameters(heavy=8, recent=8, slack=1),
        EvictionParameters(heavy=8, recent=8, pinned=3, slack=7),
        EvictionParameters(heavy=0, recent=5, slack=3),
        EvictionParameters(heavy=20, recent=1, pinned=1, slack=64),
    ],
)
def test_dropping_rows_equals_masking_them(
    rng: np.random.Generator, parameters: EvictionParameters, keep_all: bool
) -> None:
    """64 tokens in full chunks and 200 in any chunks, against all keys with -inf masks."""
    n_head_kv, group, size = 2, 3, 8
    cache = LayerCache(
        n_head_kv, size, cache_dtype=np.float64, score_dtype=np.float64, keep_all=keep_all
    )
    naive = [NaiveHead(parameters) for _ in range(n_head_kv)]
    position = 0
    while position < 264:
        n_tokens = (
            int(rng.integers(1, parameters.slack + 1)) if position >= 64 else parameters.slack
        )
        queries = 3 * rng.standard_normal((n_head_kv * group, n_tokens, size))
        keys, values = rng.standard_normal((2, n_head_kv, n_tokens, size))
        expected = [
            head.step(queries[h * group : (h + 1) * group], keys[h], values[h])
            for h, head in enumerate(naive)
        ]

        outputs = evaluate(cache, parameters, queries, keys, values, position)
        position += n_tokens

        np.testing.assert_allclose(outputs, np.concatenate(expected), atol=1e-10)
        for h, head in enumerate(naive):
            assert cache.positions(h).tolist() == head.kept
            scores = [head.scores[j] for j in head.kept]
            np.testing.assert_allclose(cache.scores(h), scores, atol=1e-10)
    assert cache.keys.shape[1] == (position if keep_all else cache.n_rows)


def test_a_slack_of_1_is_the_algorithm_of_the_paper(rng: np.random.Generator) -> None:
    """Attend to budget + 1 rows, then evict one per head, as the authors' dropping cache does."""
    n_head, size, heavy, recent = 3, 8, 8, 8
    cache = LayerCache(n_head, size, cache_dtype=np.float64, score_dtype=np.float64)
    keys, values = np.empty((2, n_head, 0, size))
    positions = np.empty((n_head, 0), dtype=np.int64)
    sums = np.empty((n_head, 0))
    for position in range(200):
        query, key, value = 3 * rng.standard_normal((3, n_head, 1, size))
        keys = np.concatenate([keys, key], axis=1)
        values = np.concatenate([values, value], axis=1)
        positions = np.pad(positions, ((0, 0), (0, 1)), constant_values=position)
        attention = np.exp(np.einsum("hqd,hkd->hk", query, keys) / np.sqrt(size))
        attention /= attention.sum(axis=1, keepdims=True)
        sums = np.pad(sums, ((0, 0), (0, 1))) + attention

        parameters = EvictionParameters(heavy=heavy, recent=recent)
        output = evaluate(cache, parameters, query, key, value, position)

        np.testing.assert_allclose(output[:, 0], np.einsum("hk,hkd->hd", attention, values))
        assert [cache.positions(h).tolist() for h in range(n_head)] == positions.tolist()
        n_rows = keys.shape[1]
        if n_rows > heavy + recent:
            best = np.argsort(sums[:, : n_rows - recent], axis=1)[:, -heavy:]
            last = np.tile(np.arange(n_rows - recent, n_rows), (n_head, 1))
            keep = np.concatenate([np.sort(best, axis=1), last], axis=1)
            keys, values = (np.take_along_axis(x, keep[..., None], axis=1) for x in (keys, values))
            positions, sums = (np.take_along_axis(x, keep, axis=1) for x in (positions, sums))
