"""Recall, its choice: which archived rows come back, and where they are placed.

Source: our own. Eviction forgets: what no policy has kept can be the very thing that is asked for.
So the archive is asked as the cache is. The question is the last queries of the text: each meets,
under one softmax, the rows that its head holds and all archived ones that it does not, *hidden*
there. What a block of neighbouring positions gets of that is its *mass* in a head, and its *weight*
is the sum of the squared masses: the few heads that point at something must not drown in the many
that look everywhere a little.

A block that stands out brings the more of its neighbours, the more it does. The blocks that are
wanted most are one list for all layers and heads; each head takes of it the positions that it does
not hold, and all take as many.

Here are arrays only. `archived` is always [n_archived], the contiguous positions of the archive,
and blocks are counted from the one that its first position is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

PAGE = 64  # positions 64g .. 64g + 63 are looked at as one stretch of text
MOST_ASKING = 16  # queries of the last tokens
BLOCK = 16  # positions 16b .. 16b + 15 are weighed together

# Where the key words are found, what they were about is next to them, more often behind than
# before. So a block is wanted for its neighbours' sake, too: nearly as much as the one or two
# before it and the one behind; from there on half as much with each block further behind them, and
# three tenths before them.
NEARLY = {-2: 0.8, -1: 0.9, 1: 0.7}
FROM_BEFORE, FROM_BEHIND = 0.5, 0.3

# Recalled rows are no further away than one in so many of the positions.
FURTHEST = 3


@dataclass(frozen=True)
class RecalledSpan:
    """Adjacent blocks of the list: positions start <= p < end, and the sum of their weights."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class BlockList:
    """The blocks that the heads take rows of.

    Attributes:
        blocks: in the order of the list.
        n_rows: that each head takes, going through the list.
        margin: the least relative difference between two blocks, as much as they are wanted, whose
            order was looked at; two implementations that differ by rounding may choose differently
            where it is as small. Infinity where there was one block, or none.
    """

    blocks: tuple[int, ...]
    n_rows: int
    margin: float


def far_places(positions: IntArray, shift: int) -> IntArray:
    """[n] rotary positions at which hidden keys are looked at.

    Original distances to the text while positions last, then as far away as there are positions: at
    the start. Each page is moved as a whole, so order and distances inside it are kept.

    Args:
        positions: [n] of the text.
        shift: positions by which the text has been moved back so far.
    """
    starts = positions // PAGE * PAGE
    places: IntArray = np.maximum(starts - shift, 0) + (positions - starts)
    return places


def block_sums(per_position: npt.NDArray[Any], archived: IntArray) -> npt.NDArray[Any]:
    """[..., n_archived] to [..., n_blocks]: the sums over the positions of each block."""
    _, firsts = np.unique(archived // BLOCK, return_index=True)
    sums: npt.NDArray[Any] = np.add.reduceat(per_position, firsts, axis=-1)
    return sums


def block_weights(masses: FloatArray) -> FloatArray:
    """[n_blocks] sum of the squared masses [n_layer, n_head, n_blocks] over layers and heads."""
    weights: FloatArray = np.square(masses, dtype=np.float64).sum(axis=(0, 1))
    return weights


def wanted_blocks(weights: FloatArray) -> FloatArray:
    """[n_blocks] how much each block is wanted: for its own weight, or for a neighbour's.

    Args:
        weights: [n_blocks].
    """
    wanted = weights.astype(np.float64)
    for offset, share in NEARLY.items():
        for block in range(max(0, -offset), wanted.size - max(0, offset)):
            wanted[block] = max(wanted[block], share * weights[block + offset])
    for block in range(1, wanted.size):
        wanted[block] = max(wanted[block], FROM_BEFORE * wanted[block - 1])
    for block in reversed(range(wanted.size - 1)):
        wanted[block] = max(wanted[block], FROM_BEHIND * wanted[block + 1])
    return wanted


def choose_blocks(weights: FloatArray, n_hidden: IntArray, n_rows: int) -> BlockList:
    """The shortest list of blocks that gives every head as many rows as it may take.

    The most wanted come first, of equal ones the newer. There is nothing in it without weights.

    Args:
        weights: [n_blocks].
        n_hidden: [n_heads, n_blocks] rows that each head of any layer does not hold.
        n_rows: wanted; all heads take fewer if one has fewer to take.
    """
    n_most = min(n_rows, int(n_hidden.sum(axis=1).min()))
    wanted = wanted_blocks(weights)
    # of equal ones the newer first
    order = np.lexsort((np.arange(wanted.size), wanted))[::-1]
    order = order[wanted[order] > 0]
    found = np.zeros(len(n_hidden), dtype=np.int64)
    blocks: list[int] = []
    for block in order:
        if found.min() >= n_most:
            break
        blocks.append(int(block))
        found += n_hidden[:, block]
    in_order = wanted[order[: len(blocks) + 1]] if blocks else np.empty(0)
    gaps = (in_order[:-1] - in_order[1:]) / in_order[:-1]
    return BlockList(
        blocks=tuple(blocks),
        n_rows=min(n_most, int(found.min())),
        margin=float(gaps.min(initial=np.inf)),
    )


def taken_positions(chosen: BlockList, hidden: BoolArray, archived: IntArray) -> IntArray:
    """[n_rows] positions that one head takes: the first hidden ones of the list; ascending.

    Args:
        chosen: the list.
        hidden: [n_archived] positions that this head does not hold.
        archived: see above.
    """
    block_of = archived // BLOCK - archived[0] // BLOCK
    in_list = np.concatenate([np.flatnonzero(block_of == block) for block in chosen.blocks])
    taken = in_list[hidden[in_list]][: chosen.n_rows]
    positions: IntArray = np.sort(archived[taken])
    return positions


def spans_of(blocks: Sequence[int], weights: FloatArray, archived: IntArray) -> list[RecalledSpan]:
    """The runs of adjacent blocks, in the order of the text."""
    spans: list[RecalledSpan] = []
    block_of = archived // BLOCK - archived[0] // BLOCK
    for block in sorted(blocks):
        positions = archived[block_of == block]
        start, end, weight = int(positions[0]), int(positions[-1]) + 1, float(weights[block])
        if spans and spans[-1].end == start:
            before = spans.pop()
            start, weight = before.start, before.weight + weight
        spans.append(RecalledSpan(start, end, weight))
    return spans


def least_place(spans: Sequence[RecalledSpan], next_place: int, n_pos: int | None) -> int:
    """The least rotary position of what is recalled.

    Models find less at the end of the positions that they were trained on, so nothing is put
    further away than a third of them, unless there is so much that it needs the room.

    Args:
        spans: all that is recalled.
        next_place: rotary position of the next token.
        n_pos: positions the model was trained on; None if there is no end of them.
    """
    if n_pos is None:
        return 0
    n_all = sum(span.end - span.start for span in spans)
    return max(next_place - max(n_pos // FURTHEST, 2 * n_all), 0)


def recalled_places(
    positions: IntArray, spans: Sequence[RecalledSpan], shift: int, least: int = 0
) -> IntArray:
    """[n] rotary positions of recalled rows, the same for every head that takes a position.

    Each span is moved as a whole: back by `shift` as the text has been, but not below `least`, and
    behind the span before it.

    Args:
        positions: [n] each in a span.
        spans: in the order of the text.
        shift: see :func:`far_places`.
        least: see :func:`least_place`.
    """
    places = np.empty_like(positions)
    for span in spans:
        first = max(span.start - shift, least)
        inside = (span.start <= positions) & (positions < span.end)
        places[inside] = first + positions[inside] - span.start
        least = first + span.end - span.start
    return places


def missed_masses(masses: FloatArray, n_hidden: IntArray, n_taken: IntArray) -> FloatArray:
    """What is left of the masses once rows are taken; of a block in part, by the share of its rows.

    Args:
        masses: [..., n_blocks].
        n_hidden, n_taken: [..., n_blocks] rows that the head does not hold, and takes of them.
    """
    left: FloatArray = masses * (1 - n_taken / np.maximum(n_hidden, 1))
    return left
