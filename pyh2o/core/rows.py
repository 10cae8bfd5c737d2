"""The tokens that the cache still holds, counted over all layers and KV heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cache.watched import WatchedCache
from .text import Text


@dataclass(frozen=True)
class HeavyHitter:
    """A token in the cache and its score.

    Attributes:
        token: token ID.
        text: text of the token.
        position: position in the text, from 0.
        score: mean score of its rows (see `Llama.kv_rows`) over the selected (layer, KV head)
            pairs; a pair that has evicted the token counts as 0.
        rows: number of these pairs that still hold the token.
    """

    token: int
    text: str
    position: int
    score: float
    rows: int


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that at least one (layer, KV head) pair still holds, in text order.

    Attributes:
        positions: [n] token positions, ascending.
        rows: [n] number of pairs that hold each token.
        scores: [n] mean score over all pairs; a pair that has evicted the token counts as 0. All 0
            for a full cache, which has no scores.
        pairs: number of (layer, KV head) pairs.
    """

    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    pairs: int

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """[n] share of the pairs that hold each token, above 0 and up to 1."""
        return self.rows / self.pairs

    def heaviest(self, n: int) -> npt.NDArray[np.int64]:
        """Return the indices of the n highest scores, descending; of equal ones the newer first."""
        newest_first = np.arange(len(self.scores))[::-1]
        order = np.argsort(-self.scores[newest_first], kind="stable")
        return newest_first[order[:n]]


def kept_tokens(
    text: Text | WatchedCache, *, layer: int | None = None, head: int | None = None
) -> KeptTokens:
    """Return the tokens that the cache holds now, in one or all layers and KV heads."""
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
    """Return the tokens in the cache with the highest scores (see `Llama.heavy_hitters`)."""
    text.kv_rows(0 if layer is None else layer)  # raises if there are no scores
    kept = kept_tokens(text, layer=layer, head=head)
    hitters: list[HeavyHitter] = []
    for i in kept.heaviest(n):
        position = int(kept.positions[i])
        token = int(text.record[position])
        word = text.model.detokenize([token], special=True).decode("utf-8", errors="replace")
        score, rows = float(kept.scores[i]), int(kept.rows[i])
        hitters.append(HeavyHitter(token, word, position, score, rows))
    return hitters
