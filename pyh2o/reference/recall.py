"""Recall: archived rows that the last queries look for are shown to all later ones.

Source: our own. The choice is that of :mod:`~pyh2o.reference.recall_choice`; here it is made on the
caches of a model, and what was chosen is fetched from their archives. Recalled rows lie beside the
rows in use: they may be dropped at any time, since the archive has them, and while they are there
they count as hidden, so they can be chosen again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .archive import LayerArchive, Rotate
from .attention import attention_probabilities
from .cache import LayerCache
from .recall_choice import (
    MOST_ASKING,
    RecalledSpan,
    block_sums,
    block_weights,
    choose_blocks,
    far_places,
    least_place,
    missed_masses,
    recalled_places,
    spans_of,
    taken_positions,
)

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recalled:
    """What was recalled, and what the choice was made by.

    Attributes:
        spans: of the text, the same for all layers and heads, in its order.
        positions: [n_layer, n_head_kv, n_recalled] that each head took of them, ascending.
        places: [n_layer, n_head_kv, n_recalled] positions that their keys are rotated to.
        weights: [n_blocks] of the archive's blocks.
        hidden_mass: share of the question's attention that hidden rows would get, 0 to 1: mean over
            queries, layers and query heads.
        missed_mass: what of that the rows recalled do not get.
        margin: how clear the choice was (see :class:`~pyh2o.reference.recall_choice.BlockList`).
    """

    spans: tuple[RecalledSpan, ...]
    positions: IntArray
    places: IntArray
    weights: FloatArray
    hidden_mass: float
    missed_mass: float
    margin: float

    @property
    def n_rows(self) -> int:
        """Rows recalled in every (layer, KV head)."""
        return int(self.positions.shape[-1])


class Recall:
    """What a model recalls.

    Args:
        caches: [n_layer] of the model.
        rotate: turns keys [n_heads, n, head_size] by [n] positions.
        n_pos: positions the model was trained on; None if there is no end of them.

    Attributes:
        recalled: what is shown now.
    """

    def __init__(self, caches: Sequence[LayerCache], rotate: Rotate, n_pos: int | None) -> None:
        self._caches = caches
        self._rotate = rotate
        self._n_pos = n_pos
        none = np.empty((len(caches), caches[0].n_head_kv, 0), dtype=np.int64)
        self._nothing = Recalled((), none, none, np.zeros(0), 0.0, 0.0, float("inf"))
        self.recalled = self._nothing

    def recall(self, *, n_rows: int, n_asking: int, shift: int, next_position: int) -> None:
        """Recall anew, in place of what was recalled before.

        Args:
            n_rows, n_asking: see :meth:`~pyh2o.reference.model.ReferenceLlama.recall`.
            shift: positions by which the text has been moved back so far.
            next_position: of the text.

        Raises:
            ValueError: there is no archive, or a count is too small.
        """
        if any(cache.archive is None for cache in self._caches):
            raise ValueError("this model does not recall: give heavy, recent and recall_queries")
        if n_rows < 0 or n_asking < 1:
            raise ValueError(f"{n_rows} rows and {n_asking} tokens: need >= 0 and >= 1")
        self.recalled = self._choose(n_rows, n_asking, shift)
        self._place(shift, next_position)

    def rebase(self, shift: int, next_position: int) -> None:
        """Put the same rows at their new places, now that the text has been moved by `shift`."""
        if self.recalled.n_rows:
            self._place(shift, next_position)

    def _place(self, shift: int, next_position: int) -> None:
        recalled = self.recalled
        least = least_place(recalled.spans, next_position - shift, self._n_pos)
        places = recalled_places(recalled.positions, recalled.spans, shift, least)
        self.recalled = replace(recalled, places=places)
        self._show()

    def _choose(self, n_rows: int, n_asking: int, shift: int) -> Recalled:
        """Choose what the last tokens look for among the hidden rows."""
        archive = _archive_of(self._caches[0])
        if archive.n_positions == 0 or archive.queries.positions.size == 0:
            return self._nothing
        archived = np.arange(archive.n_positions)
        hidden = np.stack([_hidden_rows(cache) for cache in self._caches])
        n_hidden = block_sums(hidden.astype(np.int64), archived)
        rows = [_row_masses(cache, n_asking, shift, self._rotate) for cache in self._caches]
        masses = block_sums(np.stack(rows), archived)
        weights = block_weights(masses)
        hidden_mass = _mean_sum(masses)
        chosen = choose_blocks(weights, n_hidden.reshape(-1, weights.size), n_rows)
        looked_at = replace(
            self._nothing, weights=weights, hidden_mass=hidden_mass, missed_mass=hidden_mass
        )
        if chosen.n_rows == 0:
            return looked_at

        spans = spans_of(chosen.blocks, weights, archived)
        positions = np.array(
            [[taken_positions(chosen, head, archived) for head in heads] for heads in hidden]
        )
        taken = np.zeros_like(hidden)
        np.put_along_axis(taken, positions, True, axis=2)
        n_taken = block_sums(taken.astype(np.int64), archived)
        group = masses.shape[1] // hidden.shape[1]
        missed = missed_masses(
            masses, np.repeat(n_hidden, group, axis=1), np.repeat(n_taken, group, axis=1)
        )
        return replace(
            looked_at,
            spans=tuple(spans),
            positions=positions,
            missed_mass=_mean_sum(missed),
            margin=chosen.margin,
        )

    def _show(self) -> None:
        """Fetch the rows from the archives and show them to all later queries.

        Keys are turned from where the archive has them, so however often the text was moved, they
        are rounded once more than there.
        """
        for cache, positions, places in zip(
            self._caches, self.recalled.positions, self.recalled.places, strict=True
        ):
            archive = _archive_of(cache)
            heads = range(cache.n_head_kv)
            cache.show(
                np.stack(
                    [archive.keys_at(h, positions[h], places[h], self._rotate) for h in heads]
                ),
                np.stack([archive.values_of(h, positions[h]) for h in heads]),
            )


def _hidden_rows(cache: LayerCache) -> BoolArray:
    """[n_head_kv, n_archived] True for positions that are in the archive and not in the head."""
    archived = np.arange(_archive_of(cache).n_positions)
    heads = range(cache.n_head_kv)
    return np.stack([~np.isin(archived, cache.positions(head)) for head in heads])


def _row_masses(
    cache: LayerCache, n_asking: int, shift: int, rotate: Rotate
) -> npt.NDArray[np.float64]:
    """[n_head, n_archived] what a query pays to each archived row that its head does not hold.

    The mean over the queries that ask; the softmax is over those rows at their far places and the
    rows in use together, without the rows that are recalled now.
    """
    archive = _archive_of(cache)
    archived = np.arange(archive.n_positions)
    places = far_places(archived, shift)
    heads = range(cache.n_head_kv)
    far_keys = np.stack([archive.keys_at(head, archived, places, rotate) for head in heads])
    asking = archive.queries.some_of(n_asking, MOST_ASKING)
    queries = archive.queries.rotated[:, asking]
    in_use = cache.visible(archive.queries.positions[asking])
    # No query is older than the recent window, so what has left it is in the past of all.
    hidden = np.repeat(_hidden_rows(cache)[:, None], in_use.shape[1], axis=1)
    probabilities = attention_probabilities(
        queries,
        np.concatenate([far_keys, cache.keys], axis=1).astype(queries.dtype),
        np.concatenate([hidden, in_use], axis=2),
    )
    masses: npt.NDArray[np.float64] = probabilities[..., : archived.size].mean(
        axis=1, dtype=np.float64
    )
    return masses


def _mean_sum(masses: FloatArray) -> float:
    """Mean over layers and heads of the sum over blocks of [n_layer, n_head, n_blocks]."""
    return float(masses.sum(axis=2).mean())


def _archive_of(cache: LayerCache) -> LayerArchive:
    assert cache.archive is not None
    return cache.archive
