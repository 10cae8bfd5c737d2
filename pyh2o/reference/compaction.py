"""A compaction: a policy scores the rows of all layers and heads, and the best ones stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..policies import HeadRows, Policy
from .cache import LayerCache
from .eviction import (
    EvictionParameters,
    choose,
    competing_rows,
    gap,
    margin,
    pinned_rows,
    select,
)
from .shapes import ADAPTIVE_SHARE, Shape, pyramid_places

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RotaryPlace:
    """Where the text stands, for policies that look at its rotary embeddings.

    Attributes:
        next_position: that the next token is rotated to.
        frequencies: [head_size / 2] radians per position of each pair.
    """

    next_position: int
    frequencies: FloatArray


def compact(
    caches: Sequence[LayerCache],
    eviction: EvictionParameters,
    policy: Policy,
    place: RotaryPlace,
    *,
    shape: Shape = "uniform",
) -> float:
    """Keep the pinned, recent and heavy rows of every (layer, KV head) and evict all others.

    Args:
        caches: [n_layer].
        eviction: what each (layer, KV head) keeps.
        policy: that scores the rows.
        place: see there.
        shape: how the budgets differ (see :mod:`~pyh2o.reference.shapes`).

    Returns:
        The smallest :func:`~pyh2o.reference.eviction.margin` among the heads.
    """
    layers = layer_parameters(eviction, shape, len(caches))
    rows = [
        _head_rows(cache, parameters, policy, layer, place)
        for layer, (cache, parameters) in enumerate(zip(caches, layers, strict=True))
    ]
    scores = [[_score(policy, head) for head in heads] for heads in rows]
    if not policy.needs_attention:
        for cache, of_layer in zip(caches, scores, strict=True):
            cache.set_scores(of_layer)
    scores = _averaged(scores, policy)
    smallest = float("inf")
    for cache, parameters, heads, of_layer in zip(caches, layers, rows, scores, strict=True):
        keep = _keep_adaptive if shape == "adaptive" else _keep_uniform
        kept, clear = keep(parameters, heads, of_layer)
        cache.keep(kept)
        smallest = min(smallest, clear)
    return smallest


def layer_parameters(
    eviction: EvictionParameters, shape: Shape, n_layer: int
) -> list[EvictionParameters]:
    """[n_layer] what the heads of each layer keep.

    Raises:
        ValueError: pinned spans do not fit the heavy rows of a layer.
    """
    if shape != "pyramid":
        return [eviction] * n_layer
    places = pyramid_places(eviction.heavy, n_layer)
    return [replace(eviction, heavy=int(heavy)) for heavy in places]


def _head_rows(
    cache: LayerCache,
    parameters: EvictionParameters,
    policy: Policy,
    layer: int,
    place: RotaryPlace,
) -> list[HeadRows]:
    """What a policy sees of the KV heads of a layer."""
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
        )
        collected = cache.row_scores[head, rows]
        n_kept = min(positions.size, parameters.budget)
        heads.append(
            HeadRows(
                positions=positions,
                newest=int(positions.max(initial=-1)),
                attention=collected if policy.needs_attention else np.zeros_like(collected),
                squares=cache.row_squares[head, rows],
                keys=cache.keys[head, rows],
                values=cache.values[head, rows],
                query_attention=attention_of_queries[head][:, rows],
                queries=cache.queries_of(head),
                query_rotary_positions=cache.query_rotary_positions,
                next_rotary_position=place.next_position,
                rope_frequencies=place.frequencies,
                pinned=pinned_rows(positions, pinned=parameters.pinned, spans=parameters.spans),
                competing=competing,
                n_places=max(0, n_kept - int((~competing).sum())),
                n_recent=parameters.recent,
                layer=layer,
                head=head,
            )
        )
    return heads


def _score(policy: Policy, rows: HeadRows) -> FloatArray:
    """[n] the policy's scores, and 0 for rows that do not compete."""
    if not rows.competing.any():
        return np.zeros(rows.positions.size)
    return np.where(rows.competing, policy.score(rows), 0)


def _averaged(scores: list[list[FloatArray]], policy: Policy) -> list[list[FloatArray]]:
    """The scores that the choice goes by: those of heads that have to agree are averaged.

    Such heads have kept the same positions at every compaction before, so their rows correspond.
    """
    if policy.scope == "head":
        return scores
    if policy.scope == "layer":
        return [[np.mean(heads, axis=0)] * len(heads) for heads in scores]
    everywhere = np.mean([head for heads in scores for head in heads], axis=0)
    return [[everywhere] * len(heads) for heads in scores]


def _keep_uniform(
    parameters: EvictionParameters, heads: Sequence[HeadRows], scores: Sequence[FloatArray]
) -> tuple[list[IntArray], float]:
    """Indices of the rows that each head of a layer keeps, and how clear the choice was."""
    kept, smallest = [], float("inf")
    for rows, of_head in zip(heads, scores, strict=True):
        rule: dict[str, Any] = {
            "pinned": parameters.pinned,
            "recent": parameters.recent,
            "spans": parameters.spans,
            "starts": parameters.starts,
        }
        kept.append(select(of_head, rows.positions, heavy=parameters.heavy, **rule))
        smallest = min(smallest, margin(of_head, rows.positions, kept[-1], **rule))
    return kept, smallest


def _keep_adaptive(
    parameters: EvictionParameters, heads: Sequence[HeadRows], scores: Sequence[FloatArray]
) -> tuple[list[IntArray], float]:
    """The same with one pot of places for all heads of the layer.

    Source: Feng et al., "Ada-KV: optimizing KV cache eviction by adaptive budget allocation for
    efficient LLM inference", 2024 (https://arxiv.org/abs/2407.11550), as in NVIDIA/kvpress,
    `kvpress/presses/adakv_press.py`: each head keeps 0.2 of its uniform share for sure, the rest
    goes to the best scores of all heads of the layer, whose scores are compared as they are.
    """
    candidates = [np.flatnonzero(rows.competing) for rows in heads]
    places = [
        max(0, parameters.budget - (rows.positions.size - indices.size))
        for rows, indices in zip(heads, candidates, strict=True)
    ]
    of_all = np.concatenate([of_head[i] for of_head, i in zip(scores, candidates, strict=True)])
    positions = np.concatenate(
        [rows.positions[i] for rows, i in zip(heads, candidates, strict=True)]
    )
    groups = np.repeat(np.arange(len(heads)), [indices.size for indices in candidates])
    sure = np.array([math.floor(ADAPTIVE_SHARE * n) for n in places])
    stay = choose(of_all, positions, groups=groups, sure=sure, n_places=sum(places))
    kept = []
    for head, (rows, indices) in enumerate(zip(heads, candidates, strict=True)):
        is_kept = ~rows.competing
        is_kept[indices] = stay[groups == head]
        kept.append(np.flatnonzero(is_kept))
    return kept, gap(of_all, stay, groups=groups, sure=sure)
