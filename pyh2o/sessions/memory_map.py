"""Which tokens of a session's text the cache holds, for a client that draws them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cache.rows import WatchedCache, kept_tokens
from ..cache.statistics import KVStatistics
from ..errors import SettingsError
from ..writing.cached_text import Span


def recent_from(kv: KVStatistics) -> int:
    """Position of the first token that is recent."""
    return max(0, kv.position - kv.recent)


def archived(kv: KVStatistics) -> list[Span]:
    """Tokens in the archive: the oldest leave it first."""
    return [(kv.unarchived, kv.unarchived + kv.archived)] if kv.archived else []


def holders(cache: WatchedCache, position: int) -> tuple[list[tuple[int, int]], int, float]:
    """The (layer, KV head) pairs that hold a token, of how many, and the mean of its scores."""
    if not cache.evicting:
        return ([(0, 0)] if position < cache.n_tokens else []), 1, 0.0
    held, scores, n_pairs = [], 0.0, 0
    for layer, (positions, of_rows) in enumerate(cache.rows):
        n_pairs += len(positions)
        heads, rows = np.nonzero(positions == position)
        held += [(layer, int(head)) for head in heads]
        scores += float(of_rows[heads, rows].sum())
    return held, n_pairs, scores / max(1, n_pairs)


def kv_numbers(kv: KVStatistics) -> dict[str, Any]:
    """The numbers of a cache that a client shows."""
    return {
        "position": kv.position,
        "used": kv.used,
        "budget": kv.budget,
        "capacity": kv.capacity,
        "compactions": kv.compactions,
        "bytes": kv.bytes_total,
        "bytes_full": kv.bytes_full,
        "bytes_archive": kv.bytes_archive,
        "found_share": kv.found_share if kv.limits.recall else None,
    }


def map_json(
    cache: WatchedCache, layer: int | None, head: int | None, n_tokens: int, pinned: list[Span]
) -> dict[str, Any]:
    """The memory map: what is kept.

    Args:
        cache: of a text.
        layer, head: whose rows are counted; None for those of all.
        n_tokens: of the text.
        pinned: spans that are never evicted.

    Raises:
        SettingsError: there is no such layer, or no such KV head in all of the layers.
    """
    n_heads = [len(positions) for positions, _ in cache.rows]
    if layer is not None and not 0 <= layer < cache.n_layer:
        raise SettingsError(
            f"there is no layer {layer}: give one of the {cache.n_layer}, from 0 on"
        )
    counted = n_heads if layer is None else n_heads[layer : layer + 1]
    if head is not None and counted and not 0 <= head < min(counted):
        raise SettingsError(f"there is no KV head {head} in each of the layers: give a lower one")
    kept = kept_tokens(cache, layer=layer, head=head)
    return {
        "tokens": n_tokens,
        "pairs": kept.pairs,
        "layers": cache.n_layer,
        "heads": max(n_heads, default=1),
        "recent_from": recent_from(cache.kv),
        "pinned": pinned,
        "archived": archived(cache.kv),
        "recalled": list(cache.recalled),
        "kept": {
            "positions": kept.positions.tolist(),
            "rows": kept.rows.tolist(),
            "scores": [round(score, 6) for score in kept.scores.tolist()],
        },
        "kv": kv_numbers(cache.kv),
    }
