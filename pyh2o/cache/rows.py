"""Which tokens of the text the cache still holds, counted over all layers and KV heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .statistics import KVStatistics

if TYPE_CHECKING:
    from ..core.text import Text
    from .kv_cache import FloatArray, IntArray


@dataclass(frozen=True)
class HeavyHitter:
    """A token that is still in the cache, and what it is worth to the policy.

    Attributes:
        token: its id.
        text: its text.
        position: its place in the text, from 0.
        score: of its rows (see `Llama.kv_rows`), the mean over the (layer, KV head) pairs asked
            for; a pair that has evicted it counts as 0.
        rows: how many of those pairs still hold it.
    """

    token: int
    text: str
    position: int
    score: float
    rows: int


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that at least one (layer, KV head) pair still holds, in the order of the text.

    Attributes:
        positions: [n] token positions, ascending.
        rows: [n] how many pairs hold each.
        scores: [n] attention each collected, the mean over all pairs; a pair that has evicted it
            counts as 0, and so does every pair of a full cache, which keeps no scores.
        pairs: how many (layer, KV head) pairs the model has.
    """

    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    pairs: int

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """[n] the share of the pairs that hold each, above 0 and up to 1."""
        return self.rows / self.pairs

    def heaviest(self, n: int) -> npt.NDArray[np.int64]:
        """Indices of the n tokens with the highest scores, highest first; of equals the newer."""
        newest_first = np.arange(len(self.scores))[::-1]
        order = np.argsort(-self.scores[newest_first], kind="stable")
        return newest_first[order[:n]]


@dataclass
class WatchedCache:
    """A cache between two batches, for who watches a text being read and written.

    Attributes:
        evicting, n_layer: of the model.
        n_tokens: of the text that have been evaluated.
        kv: what the cache holds and costs.
        rows: positions and scores of each layer (see `Llama.kv_rows`); none of a full cache.
        recalled: spans of evicted tokens that were looked at: start and end (not included).
    """

    evicting: bool
    n_layer: int
    n_tokens: int
    kv: KVStatistics
    rows: list[tuple[IntArray, FloatArray]]
    recalled: tuple[tuple[int, int], ...]

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """As `Llama.kv_rows`, of a layer that there is."""
        return self.rows[layer]


def kept_tokens(
    text: Text | WatchedCache, *, layer: int | None = None, head: int | None = None
) -> KeptTokens:
    """What the cache holds of a text now; a full cache holds everything.

    Args:
        text: the text, or its cache at one moment.
        layer: only this layer; None for all.
        head: only this KV head; None for all.

    Raises:
        NativeError: no such layer.
        IndexError: no such KV head.
    """
    if not text.evicting:
        everything = np.arange(text.n_tokens, dtype=np.int64)
        return KeptTokens(everything, np.ones_like(everything), np.zeros(len(everything)), pairs=1)
    heads = slice(None) if head is None else [head]
    layers = [text.kv_rows(each) for each in (range(text.n_layer) if layer is None else [layer])]
    held = np.concatenate([positions[heads].ravel() for positions, _ in layers])
    scores = np.concatenate([scores[heads].ravel() for _, scores in layers])
    pairs = sum(len(positions[heads]) for positions, _ in layers)
    positions, index = np.unique(held, return_inverse=True)
    return KeptTokens(
        positions=positions.astype(np.int64),
        rows=np.bincount(index, minlength=len(positions)),
        scores=np.bincount(index, weights=scores, minlength=len(positions)) / pairs,
        pairs=pairs,
    )


def heavy_hitters(
    text: Text, n: int, *, layer: int | None = None, head: int | None = None
) -> list[HeavyHitter]:
    """The tokens in the cache with the highest scores (see `Llama.heavy_hitters`)."""
    text.kv_rows(0 if layer is None else layer)  # refuses where there are no scores
    kept = kept_tokens(text, layer=layer, head=head)
    hitters: list[HeavyHitter] = []
    for i in kept.heaviest(n):
        position = int(kept.positions[i])
        token = int(text.record[position])
        word = text.model.detokenize([token], special=True).decode("utf-8", errors="replace")
        score, rows = float(kept.scores[i]), int(kept.rows[i])
        hitters.append(HeavyHitter(token, word, position, score, rows))
    return hitters
