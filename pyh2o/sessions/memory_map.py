"""Which tokens of a session's text the cache holds, which have left it, and when."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache.rows import KeptTokens, WatchedCache, kept_tokens
from ..cache.statistics import KVStatistics
from ..errors import SettingsError
from ..writing.cached_text import Span

# Of the tokens that left the newest spans are told: a map is as large for any text.
MOST_LEFT_SPANS = 4096

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Look:
    """What a cache held at one moment.

    Attributes:
        kv: its numbers.
        kept: tokens that (layer, KV head) pairs hold.
        recalled: spans of evicted tokens that were looked at.
        n_layer, n_head: layers, and most KV heads of one of them.
    """

    kv: KVStatistics
    kept: KeptTokens
    recalled: tuple[Span, ...]
    n_layer: int
    n_head: int

    @property
    def recent_from(self) -> int:
        """Position of the first token that is recent."""
        return max(0, self.kv.position - self.kv.recent)

    @property
    def archived(self) -> list[Span]:
        """Tokens in the archive: the oldest leave it first."""
        first = self.kv.unarchived
        return [(first, first + self.kv.archived)] if self.kv.archived else []


def look(cache: WatchedCache, *, layer: int | None = None, head: int | None = None) -> Look:
    """Look at a cache, or at the rows of one layer or of one KV head of it.

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
    kept = kept_tokens(cache, layer=layer, head=head)
    return Look(cache.kv, kept, cache.recalled, cache.n_layer, max(n_heads, default=1))


def holders(cache: WatchedCache, position: int) -> tuple[list[tuple[int, int]], float]:
    """The (layer, KV head) pairs that hold a token, and its score, the mean over all pairs."""
    if not cache.evicting:
        return ([(0, 0)] if position < cache.n_tokens else []), 0.0
    held, scores, n_pairs = [], 0.0, 0
    for layer in range(cache.n_layer):
        positions, of_rows = cache.kv_rows(layer)
        n_pairs += len(positions)
        heads, rows = np.nonzero(positions == position)
        held += [(layer, int(head)) for head in heads]
        scores += float(of_rows[heads, rows].sum())
    return held, scores / max(1, n_pairs)


class Seen:
    """When tokens of a text left its cache and were looked at again, as far as somebody knows.

    Attributes:
        last: the last look.
    """

    def __init__(self) -> None:
        """Nothing was seen: what has left before the first look did so nobody knows when."""
        self.last: Look | None = None
        self._left_at: Positions = np.zeros(0, np.int64)
        self._recalled_at: Positions = np.zeros(0, np.int64)

    def note(self, now: Look) -> None:
        """Compare what is there with the last look."""
        n_tokens, last = now.kv.position, self.last
        n_before = 0 if last is None else min(last.kv.position, n_tokens)
        self._left_at = _sized(self._left_at, n_tokens)
        self._recalled_at = _sized(self._recalled_at, n_tokens)
        here = np.zeros(n_tokens, bool)
        if last is not None:
            here[n_before:] = True
            here[last.kept.positions[last.kept.positions < n_tokens]] = True
        here[now.kept.positions] = False
        self._left_at[here] = n_tokens
        self._left_at[now.kept.positions] = 0
        before = () if last is None else last.recalled
        for start, end in now.recalled:
            if (start, end) not in before:
                self._recalled_at[start:end] = n_tokens
        self.last = now

    def left_at(self, position: int) -> int | None:
        """Length of the text when a token left the cache; None where nobody saw it."""
        return _at(self._left_at, position)

    def recalled_at(self, position: int) -> int | None:
        """Length of the text when it looked at an evicted token last; None where nobody saw it."""
        return _at(self._recalled_at, position)

    def left(self) -> list[tuple[int, int, int]]:
        """Spans of tokens that have left, and the length of the text then; the newest of them."""
        left_at = self._left_at
        edges = np.flatnonzero(np.diff(left_at, prepend=0, append=0))
        spans = pairwise(edges)
        found = [(int(a), int(b), int(left_at[a])) for a, b in spans if left_at[a]]
        return found[-MOST_LEFT_SPANS:]


def _sized(array: Positions, n: int) -> Positions:
    """So many of the first numbers, and zeros for those that are missing."""
    return np.pad(array[:n], (0, max(0, n - len(array))))


def _at(array: Positions, position: int) -> int | None:
    found = int(array[position]) if position < len(array) else 0
    return found or None


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


def map_json(now: Look, seen: Seen, *, n_tokens: int, pinned: list[Span]) -> dict[str, Any]:
    """The memory map: what is kept, and what has left.

    Args:
        now: at the rows that are asked for.
        seen: what was seen of all rows.
        n_tokens: of the text.
        pinned: spans that are never evicted.
    """
    return {
        "tokens": n_tokens,
        "pairs": now.kept.pairs,
        "layers": now.n_layer,
        "heads": now.n_head,
        "recent_from": now.recent_from,
        "pinned": pinned,
        "archived": now.archived,
        "recalled": list(now.recalled),
        "kept": {
            "positions": now.kept.positions.tolist(),
            "rows": now.kept.rows.tolist(),
            "scores": [round(score, 6) for score in now.kept.scores.tolist()],
        },
        "evicted": seen.left(),
        "kv": kv_numbers(now.kv),
    }
