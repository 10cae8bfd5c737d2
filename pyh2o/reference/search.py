"""Search: every token finds rows among the evicted ones, and attends to them as to the others.

Source: our own. Eviction forgets: what no policy has kept can be the very thing that a token looks
for. The archive has it, so each (layer, KV head) looks there with the queries of the token itself.
A row that is archived and that the head does not hold is *hidden* there. By their codes (see
:mod:`~pyh2o.reference.codes`) all hidden rows are weighed, and the best are attended to exactly, in
one softmax with the resident rows, those that the head holds. With as many found as are hidden,
this is the full cache.

Tokens that come together search together, in groups: neighbours look for much the same. A row is
as good as the query of the group says that would look at it most.
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


@dataclass(frozen=True)
class FoundRows:
    """What one layer has found for a group of tokens.

    Attributes:
        positions: [n_head_kv, n_found] of the text, ascending.
        keys, values: [n_head_kv, n_found, head_size] keys rotated to the places of their pages.
        margin: of the closest choice (see :func:`best_rows`).
    """

    positions: IntArray
    keys: FloatArray
    values: FloatArray
    margin: float


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
    n_rows: int,
    shift: int,
    rotate: Rotate,
) -> Iterator[tuple[IntArray, FoundRows]]:
    """Find rows of one layer for the tokens of a chunk.

    Args:
        cache: of the layer, with the rows of the chunk.
        queries: [n_head, n_tokens, head_size], rotated.
        positions: [n_tokens].
        n_rows: most rows that each KV head finds.
        shift: positions by which the text has been moved back so far.
        rotate: turns keys.

    Yields:
        Indices into the chunk of tokens that search together, and what they find. Where there is
        nothing to find, that is once and for all of them.
    """
    n_rows = min(n_rows, cache.hidden(0).size)
    if n_rows == 0:
        none = np.empty((cache.n_head_kv, 0), dtype=np.int64)
        nothing = FoundRows(none, cache.keys[:, :0], cache.values[:, :0], float("inf"))
        yield np.arange(positions.size), nothing
        return
    for group in search_groups(positions.size, len(queries) // cache.n_head_kv):
        yield group, _search(cache, queries[:, group], positions[group], n_rows, shift, rotate)


def _search(
    cache: LayerCache,
    queries: FloatArray,
    positions: IntArray,
    n_rows: int,
    shift: int,
    rotate: Rotate,
) -> FoundRows:
    """What one group of tokens finds; arguments as above."""
    archive = cache.archive
    assert archive is not None
    logits = attention_logits(queries, cache.keys.astype(queries.dtype), cache.visible(positions))
    resident = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    head_size = queries.shape[-1]
    asking = queries.reshape(cache.n_head_kv, -1, head_size)
    found, margins = [], []
    for head in range(cache.n_head_kv):
        hidden = cache.hidden(head)
        products = estimates(archive.codes(head, shift, rotate), asking[head])[:, hidden]
        scores = row_scores(products / np.sqrt(head_size), resident[head].ravel())
        best, margin = best_rows(scores, n_rows)
        found.append(hidden[best])
        margins.append(margin)
    return FoundRows(
        positions=np.stack(found),
        keys=np.stack([archive.keys_at(head, of, shift, rotate) for head, of in enumerate(found)]),
        values=np.stack([archive.values[head, of] for head, of in enumerate(found)]),
        margin=min(margins),
    )


@dataclass(frozen=True)
class Found:
    """What a group of tokens found in all layers, and what it gave to that.

    Attributes:
        positions: [n_layer, n_head_kv, n_found] of the text, ascending.
        shares: [n_layer, n_head, n_tokens, n_found] of attention.
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
        np.add.at(self.weights, positions, (shares**2).sum(axis=2))
        self.n_looked += n_tokens
        mean = float(shares.sum(axis=-1).mean())
        self.found_share += (mean - self.found_share) * n_tokens / self.n_looked
