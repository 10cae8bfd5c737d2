"""Search: every token finds rows among the evicted ones, and attends to them as to the others.

Source: our own. Eviction forgets: what no policy has kept can be the very thing that a token looks
for. The archive has it, so each (layer, KV head) looks there with the queries of the token itself.
A row that is archived and that the head does not hold is *hidden* there. By their codes (see
:mod:`~research.reference.codes`) all hidden rows are weighed, and the best are attended to exactly,
in one softmax with the resident rows, those that the head holds. With as many found as are hidden,
this is the full cache.

Tokens that come together search together, in groups: neighbours look for much the same. A row is
as good as the query of the group says that would look at it most.

Few heads look far, whatever the text: those that copy and look up (Wu et al., "Retrieval Head
Mechanistically Explains Long-Context Factuality", 2024). Which they are is measured while the first
tokens search in all heads; then only these search, for as many rows in all.

What they look at is where an answer is, and all heads are needed to read it. So a token that comes
alone attends, in every head, to all hidden rows of the passage that was looked at most lately: it
is in *focus*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .archive import Rotate
from .attention import attention_logits
from .cache import LayerCache
from .codes import estimates

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

TOGETHER = 64  # queries of a KV head in a group, of all its query heads; more if one token has more
MEASURED = 512  # tokens that search in all heads
HEADS_A_ONE = 4  # heads for each one that searches
ALONE = 4  # a token alone finds one row for so many of what some find together

PASSAGE = 32  # positions
HALF_LIFE = 32  # tokens after which a look counts half


@dataclass(frozen=True)
class FoundRows:
    """What one layer has found for a group of tokens.

    Attributes:
        positions: [n_head_kv, n_found] of the text, ascending; -1 behind those of a head that
            finds fewer.
        keys, values: [n_head_kv, n_found, head_size] keys rotated to the places of their pages.
        margin: of the closest choice (see :func:`best_rows`).
    """

    positions: IntArray
    keys: FloatArray
    values: FloatArray
    margin: float


class Heads:
    """Who searches: all KV heads at first, then those that gained most.

    Args:
        n_layer, n_head_kv: of the model.
        n_rows: that a KV head finds at most, the mean over all.

    Attributes:
        n_measured: tokens that have searched in all heads, where there was something to choose.
        gains: [n_layer, n_head_kv] squared shares of attention that found rows got.
        looks: [n_layer, n_head_kv] who searches; None before that is known.
        n_hidden: rows that are hidden from a head, at most.
        interest: [n_passages] squared shares of attention that those who search gave to each
            passage of the text lately.
        focus: [0 or 1] the passage that all heads read whole.
        margin: how clear the choice of it was, as a part of the interest in it.
    """

    def __init__(self, n_layer: int, n_head_kv: int, n_rows: int) -> None:
        self.n_rows = n_rows
        self.n_measured = 0
        self.gains = np.zeros((n_layer, n_head_kv))
        self.looks: npt.NDArray[np.bool_] | None = None
        self.n_hidden = 0
        self.interest = np.zeros(0)
        self.focus: IntArray = np.zeros(0, dtype=np.int64)
        self.margin = float("inf")

    def prepare(self, n_tokens: int, n_hidden: int) -> None:
        """Before so many tokens search, from a head of whom so many rows are hidden at most."""
        self.n_hidden = n_hidden
        if self.looks is None and self.n_measured >= MEASURED:
            best = np.argsort(-self.gains.ravel(), kind="stable")[: self._n_looking]
            self.looks = np.isin(np.arange(self.gains.size), best).reshape(self.gains.shape)
        if self.looks is None and n_hidden > self.n_rows:
            self.n_measured += n_tokens
        self._choose_focus(n_tokens)
        self.interest *= 0.5 ** (n_tokens / HALF_LIFE)

    def _choose_focus(self, n_tokens: int) -> None:
        n_left = self.n_rows - -(-self.n_rows // ALONE)  # what a token alone does not find
        may_be = n_tokens == 1 and self.looks is not None and n_left >= PASSAGE
        order = np.argsort(-self.interest, kind="stable")
        order = order[self.interest[order] > 0]
        self.focus = order[:may_be]
        self.margin = float("inf")
        if may_be and order.size > 1:
            self.margin = float(1 - self.interest[order[1]] / self.interest[order[0]])

    def in_focus(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """[n] whether the rows of these positions are read by all heads."""
        return np.isin(positions // PASSAGE, self.focus)

    def most_rows(self, n_tokens: int) -> IntArray:
        """[n_layer, n_head_kv] rows that so many tokens find at most, which search together."""
        rows = np.full(self.gains.shape, self.n_rows)
        if self.looks is not None:
            together = self.n_rows * self.gains.size // self._n_looking
            rows = np.where(self.looks, together, 0)
        if self.n_hidden <= self.n_rows:  # all are found
            return rows
        few: IntArray = np.minimum(rows, n_tokens * -(-rows // ALONE))
        return few

    def add(self, found: Found) -> None:
        """Add what one group of tokens gave to what it found."""
        (n_layer, n_head_kv), n_head = self.gains.shape, found.shares.shape[1]
        squares = (found.shares.astype(np.float64) ** 2).sum(axis=2)
        of_group = (n_layer, n_head_kv, n_head // n_head_kv, squares.shape[-1])
        squares = squares.reshape(of_group).sum(axis=2)
        self.gains += squares.sum(axis=-1)
        looks = np.ones(self.gains.shape, dtype=bool) if self.looks is None else self.looks
        passages = np.maximum(found.positions, 0) // PASSAGE  # of no row: a share of 0
        n_more = int(passages.max(initial=-1)) + 1 - self.interest.size
        self.interest = np.pad(self.interest, (0, max(0, n_more)))
        np.add.at(self.interest, passages[looks], squares[looks])

    @property
    def _n_looking(self) -> int:
        return -(-self.gains.size // HEADS_A_ONE)


def search_groups(n_tokens: int, group: int) -> list[IntArray]:
    """The tokens of a chunk that search together: indices into the chunk, ascending.

    Args:
        n_tokens: of the chunk.
        group: query heads of a KV head.
    """
    size = max(1, TOGETHER // group)
    return np.split(np.arange(n_tokens), range(size, n_tokens, size))


def row_scores(logits: FloatArray, resident: FloatArray) -> FloatArray:
    """[n] how much the query looks at each row that looks at it most.

    That is the logarithm of what the row would have of the query's attention, were it alone beside
    the resident ones, over what all of these would have.

    Args:
        logits: [n_queries, n] of hidden rows.
        resident: [n_queries] logarithm of the sum of exp of the logits of resident rows.
    """
    scores: FloatArray = (logits - resident[:, None]).max(axis=0)
    return scores


def best_rows(scores: FloatArray, n_rows: int) -> tuple[IntArray, float]:
    """The best rows by their scores [n]; of equal ones the first.

    Returns:
        [n_rows] indices, ascending, fewer where there are fewer; and how clear the choice was: the
        difference of the worst score chosen and the best of the others, infinity where nothing was
        decided.
    """
    order = np.argsort(-scores, kind="stable")
    margin = float("inf")
    if 0 < n_rows < scores.size:
        last, other = (float(scores[row]) for row in order[n_rows - 1 : n_rows + 1])
        margin = last - other
    return np.sort(order[:n_rows]), margin


def search_chunk(
    cache: LayerCache,
    queries: FloatArray,
    positions: IntArray,
    *,
    heads: Heads,
    layer: int,
    shift: int,
    rotate: Rotate,
) -> Iterator[tuple[IntArray, FoundRows]]:
    """Find rows of one layer for the tokens of a chunk.

    Args:
        cache: of the layer, with the rows of the chunk.
        queries: [n_head, n_tokens, head_size], rotated.
        positions: [n_tokens].
        heads: who searches.
        layer: whose cache it is.
        shift: positions by which the text has been moved back so far.
        rotate: turns keys.

    Yields:
        Indices into the chunk of tokens that search together, and what they find. Where there is
        nothing to find, that is once and for all of them.
    """
    if heads.n_hidden == 0 or heads.n_rows == 0:
        none = np.empty((cache.n_head_kv, 0), dtype=np.int64)
        nothing = FoundRows(none, cache.keys[:, :0], cache.values[:, :0], float("inf"))
        yield np.arange(positions.size), nothing
        return
    for group in search_groups(positions.size, len(queries) // cache.n_head_kv):
        yield (
            group,
            _search(cache, queries[:, group], positions[group], heads, layer, shift, rotate),
        )


def _search(
    cache: LayerCache,
    queries: FloatArray,
    positions: IntArray,
    heads: Heads,
    layer: int,
    shift: int,
    rotate: Rotate,
) -> FoundRows:
    """What one group of tokens finds."""
    archive = cache.archive
    assert archive is not None
    most_rows = heads.most_rows(positions.size)
    width = min(int(most_rows.max()) + heads.focus.size * PASSAGE, heads.n_hidden)
    logits = attention_logits(queries, cache.keys.astype(queries.dtype), cache.visible(positions))
    resident = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    head_size = queries.shape[-1]
    asking = queries.reshape(cache.n_head_kv, -1, head_size)
    found = np.full((cache.n_head_kv, width), -1)
    margins = [float("inf")]
    for head, n_rows in enumerate(most_rows[layer].tolist()):
        hidden = cache.hidden(head)
        rows = hidden[heads.in_focus(hidden)]
        others = hidden[~heads.in_focus(hidden)]
        if n_rows > 0:
            products = estimates(archive.codes(head, shift, rotate), asking[head])[:, others]
            scores = row_scores(products / np.sqrt(head_size), resident[head].ravel())
            best, margin = best_rows(scores, n_rows)
            rows = np.sort(np.append(rows, others[best]))
            margins.append(margin)
        found[head, : rows.size] = rows
    return FoundRows(
        positions=found,
        keys=np.stack([archive.keys_at(head, of, shift, rotate) for head, of in enumerate(found)]),
        values=np.stack([archive.values[head, of] for head, of in enumerate(found)]),
        margin=min(margins),
    )


@dataclass(frozen=True)
class Found:
    """What a group of tokens found in all layers, and what it gave to that.

    Attributes:
        positions: [n_layer, n_head_kv, n_found] of the text, ascending; -1 behind those of a head
            that finds fewer.
        shares: [n_layer, n_head, n_tokens, n_found] of attention, 0 where there is no row.
    """

    positions: IntArray
    shares: FloatArray


class Looks:
    """How much tokens looked at rows among the evicted ones.

    Attributes:
        weights: [n] by position: squared shares, summed over tokens, layers and query heads.
        n_looked: tokens.
        found_share: of their attention, mean over tokens, layers and query heads.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(0)
        self.n_looked = 0
        self.found_share = 0.0

    def add(self, found: Found) -> None:
        """Add what one group of tokens found."""
        shares = found.shares.astype(np.float64)
        n_head, n_tokens = shares.shape[1:3]
        positions = np.repeat(found.positions, n_head // found.positions.shape[1], axis=1)
        n_more = int(positions.max(initial=-1)) + 1 - self.weights.size
        self.weights = np.pad(self.weights, (0, max(0, n_more)))
        np.add.at(self.weights, np.maximum(positions, 0), (shares**2).sum(axis=2))
        self.n_looked += n_tokens
        mean = float(shares.sum(axis=-1).mean())
        self.found_share += (mean - self.found_share) * n_tokens / self.n_looked
