"""Search: every token retrieves evicted rows, and attends to them as to the others.

Source: our own. A row that the policy did not keep can be the one that a token needs. The archive
has it, so each (layer, KV head) searches there with the queries of the token itself. An archived
row that a head does not hold is *hidden* from it. All hidden rows are ranked by their codes (see
:mod:`~research.reference.codes`), and the best are attended to exactly, in one softmax with the
resident rows, those that the head holds. If all hidden rows are retrieved, this is the full cache.

Tokens of a chunk search together, in groups: neighbours need similar rows. A row's score is that of
the group's query that would attend to it most.

Few heads attend to distant rows, whatever the text: those that copy and look up (Wu et al.,
"Retrieval Head Mechanistically Explains Long-Context Factuality", 2024). They are identified while
the first tokens search in all heads. Afterwards only these heads search, for the same total number
of rows.

The rows that they retrieve show where an answer is, but all heads are needed to read it. So a
single token attends, in every head, to all hidden rows of the passage that was recently retrieved
most: it is in *focus*.
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
HEADS_A_ONE = 4  # heads per searching head
ALONE = 4  # a single token retrieves this fraction of the rows of a group

PASSAGE = 32  # positions
HALF_LIFE = 32  # tokens after which interest halves


@dataclass(frozen=True)
class RetrievedRows:
    """Rows of one layer that a group of tokens retrieved.

    Attributes:
        positions: [n_head_kv, n_found] of the text, ascending; padded with -1 for a head that
            retrieves fewer.
        keys, values: [n_head_kv, n_found, head_size] keys rotated to the places of their pages.
        margin: of the closest choice (see :func:`best_rows`).
    """

    positions: IntArray
    keys: FloatArray
    values: FloatArray
    margin: float


class Heads:
    """Which heads search: all KV heads at first, then those that gained most.

    Args:
        n_layer, n_head_kv: of the model.
        n_rows: maximum rows that a KV head retrieves, on average over all.

    Attributes:
        n_measured: tokens that have searched in all heads, when there was a choice.
        gains: [n_layer, n_head_kv] squared shares of attention to retrieved rows.
        searching: [n_layer, n_head_kv] whether a head searches; None before that is known.
        n_hidden: maximum number of rows hidden from a head.
        interest: [n_passages] squared shares of attention that the searching heads recently gave to
            each passage of the text.
        focus: [0 or 1] the passage that all heads attend to as a whole.
        margin: of the choice of the focus, relative to the interest in it.
    """

    def __init__(self, n_layer: int, n_head_kv: int, n_rows: int) -> None:
        self.n_rows = n_rows
        self.n_measured = 0
        self.gains = np.zeros((n_layer, n_head_kv))
        self.searching: npt.NDArray[np.bool_] | None = None
        self.n_hidden = 0
        self.interest = np.zeros(0)
        self.focus: IntArray = np.zeros(0, dtype=np.int64)
        self.margin = float("inf")

    def prepare(self, n_tokens: int, n_hidden: int) -> None:
        """Prepare a search of `n` tokens, with at most this many rows hidden from a head."""
        self.n_hidden = n_hidden
        if self.searching is None and self.n_measured >= MEASURED:
            best = np.argsort(-self.gains.ravel(), kind="stable")[: self._n_looking]
            self.searching = np.isin(np.arange(self.gains.size), best).reshape(self.gains.shape)
        if self.searching is None and n_hidden > self.n_rows:
            self.n_measured += n_tokens
        self._choose_focus(n_tokens)
        self.interest *= 0.5 ** (n_tokens / HALF_LIFE)

    def _choose_focus(self, n_tokens: int) -> None:
        # rows that a single token does not retrieve
        n_left = self.n_rows - -(-self.n_rows // ALONE)
        may_be = n_tokens == 1 and self.searching is not None and n_left >= PASSAGE
        order = np.argsort(-self.interest, kind="stable")
        order = order[self.interest[order] > 0]
        self.focus = order[:may_be]
        self.margin = float("inf")
        if may_be and order.size > 1:
            self.margin = float(1 - self.interest[order[1]] / self.interest[order[0]])

    def in_focus(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """Return [n] whether all heads attend to the rows of these positions."""
        return np.isin(positions // PASSAGE, self.focus)

    def most_rows(self, n_tokens: int) -> IntArray:
        """Return [n_layer, n_head_kv] maximum rows that tokens of a group retrieve."""
        rows = np.full(self.gains.shape, self.n_rows)
        if self.searching is not None:
            together = self.n_rows * self.gains.size // self._n_looking
            rows = np.where(self.searching, together, 0)
        if self.n_hidden <= self.n_rows:  # all are retrieved
            return rows
        few: IntArray = np.minimum(rows, n_tokens * -(-rows // ALONE))
        return few

    def add(self, found: Retrieved) -> None:
        """Add the attention of one group of tokens to its retrieved rows."""
        (n_layer, n_head_kv), n_head = self.gains.shape, found.shares.shape[1]
        squares = (found.shares.astype(np.float64) ** 2).sum(axis=2)
        of_group = (n_layer, n_head_kv, n_head // n_head_kv, squares.shape[-1])
        squares = squares.reshape(of_group).sum(axis=2)
        self.gains += squares.sum(axis=-1)
        searching = (
            np.ones(self.gains.shape, dtype=bool) if self.searching is None else self.searching
        )
        passages = np.maximum(found.positions, 0) // PASSAGE  # padding: a share of 0
        n_more = int(passages.max(initial=-1)) + 1 - self.interest.size
        self.interest = np.pad(self.interest, (0, max(0, n_more)))
        np.add.at(self.interest, passages[searching], squares[searching])

    @property
    def _n_looking(self) -> int:
        return -(-self.gains.size // HEADS_A_ONE)


def search_groups(n_tokens: int, group: int) -> list[IntArray]:
    """Return the groups of a chunk's tokens that search together: ascending indices into the chunk.

    Args:
        n_tokens: of the chunk.
        group: query heads of a KV head.
    """
    size = max(1, TOGETHER // group)
    return np.split(np.arange(n_tokens), range(size, n_tokens, size))


def row_scores(logits: FloatArray, resident: FloatArray) -> FloatArray:
    """Return [n] for each row how much the query that attends to it most would do so.

    That is the logarithm of the row's attention, if it was added alone to the resident rows,
    divided by the attention of all resident rows.

    Args:
        logits: [n_queries, n] of hidden rows.
        resident: [n_queries] logarithm of the sum of exp of the logits of resident rows.
    """
    scores: FloatArray = (logits - resident[:, None]).max(axis=0)
    return scores


def best_rows(scores: FloatArray, n_rows: int) -> tuple[IntArray, float]:
    """Return the best rows by their scores [n]; of equal ones the first.

    Returns:
        [n_rows] indices, ascending, fewer if there are fewer; and the margin of the choice: the
        difference of the worst chosen score and the best of the others, infinity if there was no
        choice.
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
) -> Iterator[tuple[IntArray, RetrievedRows]]:
    """Retrieve rows of one layer for the tokens of a chunk.

    Args:
        cache: of the layer, with the rows of the chunk.
        queries: [n_head, n_tokens, head_size], rotated.
        positions: [n_tokens].
        heads: which heads search.
        layer: of the cache.
        shift: positions by which the text has been moved back so far.
        rotate: rotates keys.

    Yields:
        Indices into the chunk of tokens that search together, and their retrieved rows. If no row
        is hidden, this is a single group of all tokens.
    """
    if heads.n_hidden == 0 or heads.n_rows == 0:
        none = np.empty((cache.n_head_kv, 0), dtype=np.int64)
        nothing = RetrievedRows(none, cache.keys[:, :0], cache.values[:, :0], float("inf"))
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
) -> RetrievedRows:
    """Return the rows that one group of tokens retrieves."""
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
    return RetrievedRows(
        positions=found,
        keys=np.stack([archive.keys_at(head, of, shift, rotate) for head, of in enumerate(found)]),
        values=np.stack([archive.values[head, of] for head, of in enumerate(found)]),
        margin=min(margins),
    )


@dataclass(frozen=True)
class Retrieved:
    """Rows that a group of tokens retrieved in all layers, and its attention to them.

    Attributes:
        positions: [n_layer, n_head_kv, n_found] of the text, ascending; padded with -1 for a head
            that retrieves fewer.
        shares: [n_layer, n_head, n_tokens, n_found] of attention, 0 for padding.
    """

    positions: IntArray
    shares: FloatArray


class RetrievalSums:
    """Sums of tokens' attention to retrieved rows.

    Attributes:
        weights: [n] by position: squared shares, summed over tokens, layers and query heads.
        n_looked: tokens.
        found_share: of their attention, mean over tokens, layers and query heads.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(0)
        self.n_looked = 0
        self.found_share = 0.0

    def add(self, found: Retrieved) -> None:
        """Add the retrieved rows of one group of tokens."""
        shares = found.shares.astype(np.float64)
        n_head, n_tokens = shares.shape[1:3]
        positions = np.repeat(found.positions, n_head // found.positions.shape[1], axis=1)
        n_more = int(positions.max(initial=-1)) + 1 - self.weights.size
        self.weights = np.pad(self.weights, (0, max(0, n_more)))
        np.add.at(self.weights, np.maximum(positions, 0), (shares**2).sum(axis=2))
        self.n_looked += n_tokens
        mean = float(shares.sum(axis=-1).mean())
        self.found_share += (mean - self.found_share) * n_tokens / self.n_looked
