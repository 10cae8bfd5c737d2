"""Which tokens of a session's text the cache holds."""

from __future__ import annotations

from typing import Any

from ..cache.rows import WatchedCache, kept_tokens
from ..cache.statistics import KVStatistics
from ..errors import SettingsError
from ..writing.cached_text import Span


def memory_map(
    cache: WatchedCache,
    *,
    layer: int | None,
    head: int | None,
    n_tokens: int,
    pinned: list[Span],
) -> dict[str, Any]:
    """The memory map: what is kept, and what has left.

    Args:
        cache: as it is now.
        layer, head: whose rows are looked at; None for those of all.
        n_tokens: of the text.
        pinned: spans that are never evicted.

    Raises:
        SettingsError: there is no such layer, or no such KV head in all of the layers.
    """
    layers = range(cache.n_layer) if layer is None else [layer]
    n_heads = [len(positions) for positions, _ in cache.rows]
    if layer is not None and not 0 <= layer < cache.n_layer:
        raise SettingsError(
            f"there is no layer {layer}: give one of the {cache.n_layer}, from 0 on"
        )
    if head is not None and n_heads and not 0 <= head < min(n_heads[each] for each in layers):
        raise SettingsError(f"there is no KV head {head} in each of the layers: give a lower one")
    kept, kv = kept_tokens(cache, layer=layer, head=head), cache.kv
    archived = (kv.unarchived, kv.unarchived + kv.archived)  # the oldest leave it first
    return {
        "tokens": n_tokens,
        "pairs": kept.pairs,
        "layers": cache.n_layer,
        "heads": max(n_heads, default=1),
        "recent_from": max(0, kv.position - kv.recent),
        "pinned": pinned,
        "archived": [archived] if kv.archived else [],
        "recalled": list(cache.recalled),
        "kept": {
            "positions": kept.positions.tolist(),
            "rows": kept.rows.tolist(),
            "scores": [round(score, 6) for score in kept.scores.tolist()],
        },
        "kv": kv_numbers(kv),
    }


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
