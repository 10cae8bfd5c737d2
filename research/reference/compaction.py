"""A compaction: a policy scores the rows of all layers and heads, and the best ones stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o.policies import HeadRows, Policy, checked_scores

from .cache import LayerCache
from .eviction import (
    EvictionParameters,
    competing_rows,
    in_spans,
    margin,
    pinned_rows,
    select,
)

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


def compact(
    caches: Sequence[LayerCache],
    eviction: EvictionParameters,
    policy: Policy,
    rope_frequencies: FloatArray,
) -> float:
    """Keep the pinned, recent and heavy rows of every (layer, KV head) and evict all others.

    Args:
        caches: [n_layer].
        eviction: what each (layer, KV head) keeps.
        policy: scores the rows.
        rope_frequencies: [head_size / 2] radians per position of each pair.

    Returns:
        The smallest :func:`~research.reference.eviction.margin` among the heads.
    """
    rows = [
        _head_rows(cache, eviction, policy, layer, rope_frequencies)
        for layer, cache in enumerate(caches)
    ]
    scores = [[checked_scores(policy, head) for head in heads] for heads in rows]
    if "attention" not in policy.needs:
        for cache, of_layer in zip(caches, scores, strict=True):
            cache.set_scores(of_layer)
    scores = _averaged(scores, policy)
    smallest = float("inf")
    for cache, heads, of_layer in zip(caches, rows, scores, strict=True):
        kept, clear = _kept_rows(eviction, heads, of_layer)
        cache.keep(kept)
        smallest = min(smallest, clear)
    return smallest


def _head_rows(
    cache: LayerCache,
    parameters: EvictionParameters,
    policy: Policy,
    layer: int,
    rope_frequencies: FloatArray,
) -> list[HeadRows]:
    """Return the policy's inputs for the KV heads of a layer: only what it needs."""
    attention_of_queries = cache.query_attention()
    heads = []
    for head in range(cache.n_head_kv):
        rows = np.flatnonzero(~cache.evicted[head])
        positions = cache.row_positions[head, rows]
        competing = competing_rows(
            positions,
            pinned=parameters.pinned,
            recent=parameters.recent,
            spans=parameters.spans,
            dropped=parameters.dropped,
        )
        is_gone = in_spans(positions, parameters.dropped)
        n_kept = min(positions.size, parameters.budget)
        values = cache.values[head, rows].astype(np.float64)
        seen: dict[str, FloatArray] = {
            "attention": cache.row_scores[head, rows],
            "squares": cache.row_squares[head, rows],
            "query_attention": attention_of_queries[head][:, rows].sum(axis=0, dtype=np.float64),
            "keys": cache.keys[head, rows],
            "value_norms": np.linalg.norm(values, axis=1),
            "queries": cache.queries_of(head),
        }
        heads.append(
            HeadRows(
                positions=positions,
                newest=int(positions.max(initial=-1)),
                pinned=pinned_rows(positions, pinned=parameters.pinned, spans=parameters.spans),
                competing=competing,
                n_places=max(0, n_kept - int((~competing & ~is_gone).sum())),
                n_recent=parameters.recent,
                layer=layer,
                head=head,
                query_positions=cache.queries.positions,
                scale=cache.keys.shape[-1] ** -0.5,
                rope_frequencies=rope_frequencies,
                **{name: array for name, array in seen.items() if name in policy.needs},
            )
        )
    return heads


def _averaged(scores: list[list[FloatArray]], policy: Policy) -> list[list[FloatArray]]:
    """Return the scores for the selection: grouped heads get their mean.

    Such heads have kept the same positions at every previous compaction, so their rows correspond.
    """
    if policy.scope == "head":
        return scores
    if policy.scope == "layer":
        return [[np.mean(heads, axis=0)] * len(heads) for heads in scores]
    everywhere = np.mean([head for heads in scores for head in heads], axis=0)
    return [[everywhere] * len(heads) for heads in scores]


def _kept_rows(
    parameters: EvictionParameters, heads: Sequence[HeadRows], scores: Sequence[FloatArray]
) -> tuple[list[IntArray], float]:
    """Return indices of the rows that each head of a layer keeps, and the selection's margin."""
    kept, smallest = [], float("inf")
    for rows, of_head in zip(heads, scores, strict=True):
        rule: dict[str, Any] = {
            "pinned": parameters.pinned,
            "recent": parameters.recent,
            "spans": parameters.spans,
            "starts": parameters.starts,
            "dropped": parameters.dropped,
        }
        kept.append(select(of_head, rows.positions, heavy=parameters.heavy, **rule))
        smallest = min(smallest, margin(of_head, rows.positions, kept[-1], **rule))
    return kept, smallest
