"""A Llama model in NumPy whose KV cache is limited by a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o.policies import Policy, parse_policy

from .archive import Rounding, as_float16
from .attention import attend, collected_attention, collected_squares
from .cache import LayerCache
from .compaction import compact
from .eviction import EvictionParameters, Span, drop, in_spans, pinned_rows
from .layers import Rope, rms_norm, split_heads, swiglu
from .search import Heads, RetrievalSums, Retrieved, search_chunk
from .weights import LayerWeights, LlamaWeights, read_gguf

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


# If later queries have more weight, this is well within the range of float32. Longer chunks are
# weighted from their end: no query has a weight above one.
MOST_HALF_LIVES = 40


class ReferenceLlama:
    """A Llama model with one endless sequence and a cache with eviction.

    Args:
        weights: the model; computed in the type of its arrays.
        eviction: what each (layer, KV head) keeps; None keeps every row.
        policy: selects rows: a policy, or its text (see :func:`~pyh2o.policies.parse_policy`).
        cache_dtype: type that K and V rows are rounded to when they are stored.
        keep_all: mask evicted rows instead of dropping them (see
            :class:`~research.reference.cache.LayerCache`).
        recall: evicted rows that every token retrieves in each (layer, KV head); 0 for none, and no
            archive.
        archive_rounding: rounds rows to the type of the archive.

    Attributes:
        n_tokens: tokens of the text so far, the position of the next token.
        n_compactions: compactions so far.
        n_rebases: re-bases so far.
        smallest_margin: the closest selection of all compactions so far (see
            :func:`~research.reference.eviction.margin`); infinity before the first. It is of the
            final scores: RoCo also decides which rows to rank before all others.
        smallest_search_margin: the closest choice of all searches so far (see
            :func:`~research.reference.search.best_rows`); infinity before the first.
        found: rows retrieved by the last group of tokens.

    Raises:
        SettingsError: unknown policy.
        ValueError: `recall` is negative.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        eviction: EvictionParameters | None = None,
        *,
        policy: Policy | str = "h2o",
        cache_dtype: npt.DTypeLike = np.float32,
        keep_all: bool = False,
        recall: int = 0,
        archive_rounding: Rounding = as_float16,
    ) -> None:
        if recall < 0:
            raise ValueError(f"recall must be >= 0, not {recall}")
        self.weights = weights
        self._rope = Rope(weights)
        self._recall = recall if eviction else 0
        self._archive_rounding = archive_rounding
        self._first_eviction = eviction
        given = parse_policy(policy) if isinstance(policy, str) else policy
        self.policy = given.for_budget(eviction.budget) if eviction else given
        self._cache_dtype = cache_dtype
        self._keep_all = keep_all
        self.reset()

    @classmethod
    def from_gguf(
        cls,
        path: str | Path,
        *,
        heavy: int | None = None,
        recent: int | None = None,
        pinned: int = 0,
        slack: int = 1,
        n_pos: int | None = None,
        policy: Policy | str = "h2o",
        cache_dtype: npt.DTypeLike = np.float32,
        keep_all: bool = False,
        recall: int = 0,
        archive_rounding: Rounding = as_float16,
        dtype: npt.DTypeLike = np.float32,
    ) -> ReferenceLlama:
        """Read a model from a GGUF file (see :func:`~research.reference.weights.read_gguf`).

        Args:
            path: a GGUF file of the `llama` architecture.
            heavy, recent, pinned, slack: token counts; without `heavy` and `recent` nothing is
                ever evicted.
            n_pos: positions for rotary embeddings (see
                :class:`~research.reference.eviction.EvictionParameters`), which also chooses the
                factors of LongRoPE.
            policy, cache_dtype, keep_all, recall, archive_rounding: as for the class.
            dtype: type of all computation, scores included. float64 shows how much of a
                difference to another implementation is rounding.

        Raises:
            ValueError: only one of `heavy` and `recent` is given, a count is too small, or the
                model is not one the reference computes.
        """
        if (heavy is None) != (recent is None):
            raise ValueError("heavy and recent go together: give both, or none for a full cache")
        eviction = None
        if heavy is not None and recent is not None:
            eviction = EvictionParameters(
                heavy=heavy, recent=recent, pinned=pinned, slack=slack, n_pos=n_pos
            )
        weights = read_gguf(path, dtype=dtype, n_pos=n_pos)
        return cls(
            weights,
            eviction,
            policy=policy,
            cache_dtype=cache_dtype,
            keep_all=keep_all,
            recall=recall,
            archive_rounding=archive_rounding,
        )

    def reset(self) -> None:
        """Clear the text with its pins and shares."""
        hyper = self.weights.hyperparameters
        self.eviction = self._first_eviction
        self.n_tokens = 0
        self.n_compactions = 0
        self.n_rebases = 0
        self._n_rows = 0
        self._shift = 0
        self._newest_forgotten = -1
        self.smallest_margin = float("inf")
        self._first_removable = 0
        # With an older query, some rows would be in its future, which a policy would take for its
        # past.
        n_recent = self.eviction.recent if self.eviction else 0
        self._caches = [
            LayerCache(
                hyper.n_head_kv,
                hyper.head_size,
                cache_dtype=self._cache_dtype,
                score_dtype=self.weights.embedding.dtype,
                keep_all=self._keep_all,
                n_queries=min(self.policy.n_queries, n_recent),
                has_archive=self._recall > 0,
                archive_rounding=self._archive_rounding,
            )
            for _ in range(hyper.n_layer)
        ]
        self.smallest_search_margin = float("inf")
        self.found = Retrieved(
            np.empty((hyper.n_layer, hyper.n_head_kv, 0), dtype=np.int64),
            np.empty((hyper.n_layer, hyper.n_head, 0, 0)),
        )
        self._heads = Heads(hyper.n_layer, hyper.n_head_kv, self._recall)
        self.forget_found()

    @property
    def n_rows(self) -> int:
        """Rows in use, the same number for every (layer, KV head)."""
        return self._n_rows

    def positions(self, layer: int, head: int) -> IntArray:
        """Return [n_rows] token positions that this (layer, KV head) keeps, ascending."""
        return self._caches[layer].positions(head)

    def scores(self, layer: int, head: int) -> FloatArray:
        """Return [n_rows] scores of the rows that this (layer, KV head) keeps, ordered by position.

        They are the collected attention if the policy uses it. Otherwise they are the policy's
        scores of the last compaction, and 0 for rows that did not compete then or are newer.
        """
        return self._caches[layer].scores(head)

    def eval(self, tokens: Sequence[int] | IntArray, *, ubatch: int = 512) -> FloatArray:
        """Continue the text.

        The tokens are read in chunks of `ubatch`, or of `slack` if that is smaller, since a
        compaction frees no more. With eviction the result depends on the chunks: a row evicted
        before a large chunk would have been visible to its first tokens if they had come alone.

        Args:
            tokens: [n_tokens] token ids.
            ubatch: maximum tokens that are computed together.

        Returns:
            [n_tokens, n_vocab] logits of all tokens.

        Raises:
            ValueError: a token is not in the vocabulary, or `ubatch` is less than 1.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        n_vocab = self.weights.embedding.shape[0]
        if ids.ndim != 1 or ((ids < 0) | (ids >= n_vocab)).any():
            raise ValueError(f"tokens must be one list of ids from 0 to {n_vocab - 1}")
        if ubatch < 1:
            raise ValueError(f"ubatch must be >= 1, not {ubatch}")
        size = ubatch if self.eviction is None else min(ubatch, self.eviction.slack)

        logits: FloatArray = np.empty((ids.size, n_vocab), dtype=self.weights.embedding.dtype)
        for start in range(0, ids.size, size):
            chunk = ids[start : start + size]
            self._make_room(chunk.size)
            logits[start : start + chunk.size] = self._forward(chunk)
        return logits

    def remove(self, first_position: int) -> None:
        """Remove the tail of the text: drop the rows of positions >= `first_position`.

        Only rows that were recent at the last compaction can be removed, and not all of them:
        before them rows were evicted that the shorter text would still have.

        Raises:
            ValueError: the position is negative, or before the rows that can be removed.
        """
        if first_position < self._first_removable or first_position < 0:
            raise ValueError(
                f"cannot remove from position {first_position}: rows were evicted for later "
                f"tokens; the first position that can be removed is {self._first_removable}"
            )
        dropped = self.eviction.dropped if self.eviction else ()
        if in_spans(np.array([first_position - 1]), dropped).any():
            raise ValueError(f"the position before {first_position} was dropped")
        for cache in self._caches:
            cache.remove(first_position)
        self.n_tokens = min(self.n_tokens, first_position)
        self._n_rows = self._caches[0].n_rows
        self._set_dropped([span for span in dropped if span[0] < first_position])
        if self.n_tokens == 0:
            self._shift = 0
            self._newest_forgotten = -1

    @property
    def found_weights(self) -> FloatArray:
        """Return [n_tokens] attention to retrieved rows since :meth:`forget_found`, by position.

        These are squared shares of attention, summed over tokens, layers and query heads.
        """
        weights = self._retrieval.weights
        return np.pad(weights, (0, self.n_tokens - weights.size))

    @property
    def n_looked(self) -> int:
        """Tokens since :meth:`forget_found`, whether they could retrieve rows or not."""
        return self._retrieval.n_looked

    @property
    def found_share(self) -> float:
        """Retrieved rows' share of their attention: mean over tokens, layers and query heads."""
        return self._retrieval.found_share

    def forget_found(self) -> None:
        """Reset the sums of attention to retrieved rows."""
        self._retrieval = RetrievalSums()

    def pin(self, n_tokens: int) -> None:
        """Pin the first positions until the text is cleared, counted as heavy rows.

        Raises:
            ValueError: nothing is evicted, or they exceed the pinned and heavy rows.
        """
        if self.eviction is None:
            raise ValueError("there is nothing to pin in a full cache")
        heavy = self.eviction.pinned + self.eviction.heavy - n_tokens
        self.eviction = replace(self.eviction, pinned=n_tokens, heavy=heavy)
        self._restore()

    def pin_spans(self, spans: Sequence[Span]) -> None:
        """Pin these positions until the text is cleared, instead of previous spans.

        They count as heavy rows. They may lie ahead of the text; evicted rows are restored
        immediately if there is an archive.

        Args:
            spans: (start, end) each, end not included; ascending and disjoint.

        Raises:
            ValueError: nothing is evicted, the spans are not in order, or they exceed the heavy
                rows.
        """
        if self.eviction is None:
            raise ValueError("there is nothing to pin in a full cache")
        self.eviction = replace(self.eviction, spans=tuple(spans))
        self._restore()

    def drop_spans(self, spans: Sequence[Span]) -> None:
        """Drop these positions, too, until a tail with them is removed.

        Their rows are removed as in :func:`~research.reference.eviction.drop`, are not archived,
        and are not retrieved any more.

        Args:
            spans: (start, end) each, end not included; ascending, and disjoint from previous ones.

        Raises:
            ValueError: nothing is evicted, the spans are not in order, or contain pinned positions
                or the newest one.
        """
        if self.eviction is None:
            raise ValueError("there is nothing to drop from a full cache")
        positions = np.arange(max(self.n_tokens, spans[-1][1]))
        is_gone = in_spans(positions, spans)
        pinned = pinned_rows(positions, pinned=self.eviction.pinned, spans=self.eviction.spans)
        if spans[-1][1] >= self.n_tokens or (is_gone & pinned).any():
            raise ValueError("pinned positions and the newest one cannot be dropped")
        self._set_dropped(sorted([*self.eviction.dropped, *spans]))
        pairs = [(cache, head) for cache in self._caches for head in range(cache.n_head_kv)]
        kept = iter(drop([cache.positions(head) for cache, head in pairs], self.eviction.dropped))
        for cache in self._caches:
            cache.keep([next(kept) for _ in range(cache.n_head_kv)])
        self._n_rows = self._caches[0].n_rows

    def _set_dropped(self, spans: Sequence[Span]) -> None:
        if self.eviction is not None:
            self.eviction = replace(self.eviction, dropped=tuple(spans))
        for cache in self._caches:
            cache.dropped = tuple(spans)

    def share_fairly(self, starts: Sequence[int]) -> None:
        """Give each part of the text its share of the heavy rows until the text is cleared.

        Args:
            starts: first positions of the parts except the first, ascending; none for no shares
                (see :func:`~research.reference.eviction.select`).

        Raises:
            ValueError: nothing is evicted, or the starts are not in order.
        """
        if self.eviction is None:
            raise ValueError("there is nothing to share in a full cache")
        self.eviction = replace(self.eviction, starts=tuple(starts))

    def _pinned_positions(self) -> IntArray:
        """Return the pinned positions of the text so far."""
        assert self.eviction is not None
        positions = np.arange(self.n_tokens)
        return positions[
            pinned_rows(positions, pinned=self.eviction.pinned, spans=self.eviction.spans)
        ]

    def _restore(self) -> None:
        """Compact if that restores pinned rows."""
        eviction, pinned = self.eviction, self._pinned_positions()
        if eviction is not None and any(
            np.isin(pinned, cache.hidden(head)).any()
            for cache in self._caches
            for head in range(cache.n_head_kv)
        ):
            self._compact(eviction)

    def _make_room(self, n_new: int) -> None:
        """Compact every layer if `n_new` rows do not fit, re-base if their positions do not."""
        if self.eviction is None:
            return
        if self.n_rows + n_new > self.eviction.capacity:
            self._compact(self.eviction)
        n_pos = self.eviction.n_pos
        if n_pos is not None and self.n_tokens + n_new - self._shift > n_pos:
            self._rebase(n_new, n_pos)
        newest = self.n_tokens + n_new - 1
        if self.policy.n_near and newest - self._newest_forgotten > MOST_HALF_LIVES * (
            self.policy.half_life or math.inf
        ):
            self._decay(newest)

    def _rebase(self, n_new: int, n_pos: int) -> None:
        """Move the kept rows and the next tokens back.

        The next token gets half of the positions, or less if `n_new` tokens need more than the
        other half. If there are more rows than that, they get 0, 1, 2 ... and the next token
        follows. H2O's streaming variant does so at every step: the authors cache unrotated keys
        (FMInference/H2O, `utils_real_drop/modify_llama.py`, class `H2OLlamaAttention_streaming`).
        """
        next_position = max(self.n_rows, min(n_pos // 2, n_pos - n_new))
        back = self.n_tokens - self._shift - next_position
        for cache in self._caches:
            cache.rebase(back, self._rope.rotate, next_position)
        self._shift += back
        self.n_rebases += 1

    def compact(self) -> None:
        """Evict down to the budget now, as after a prompt that was read in full.

        Raises:
            ValueError: there is no eviction.
        """
        if self.eviction is None:
            raise ValueError("this model does not evict: give heavy and recent")
        self._compact(self.eviction)

    def _compact(self, eviction: EvictionParameters) -> None:
        self._decay(self.n_tokens - 1)
        for cache in self._caches:
            cache.archive_until(self.n_tokens - eviction.recent, self._shift, self._rope.rotate)
        next_position = self.n_tokens - self._shift
        restored = [
            cache.restore(self._pinned_positions(), self._shift, self._rope.rotate)
            for cache in self._caches
        ]
        smallest = compact(self._caches, eviction, self.policy, self._rope.frequencies())
        for cache, has_restored in zip(self._caches, restored, strict=True):
            if has_restored:
                cache.rebase(0, self._rope.rotate, next_position)
        self.smallest_margin = min(self.smallest_margin, smallest)
        self.n_compactions += 1
        self._n_rows = min(self._n_rows, eviction.budget)
        # One of the recent rows must stay. Evicted rows do not return when the tail is removed, so
        # this
        # never decreases.
        self._first_removable = max(self._first_removable, self.n_tokens - eviction.recent + 1)

    def _decay(self, newest: int) -> None:
        """Reduce the sums by the policy's half-life, if any, up to a position."""
        n_new = max(0, newest - self._newest_forgotten)
        self._newest_forgotten = newest
        if self.policy.half_life is not None:
            for cache in self._caches:
                cache.decay(0.5 ** (n_new / self.policy.half_life))

    def _forward(self, tokens: IntArray) -> FloatArray:
        """Return logits [n_tokens, n_vocab] of a chunk; append its rows and add to the scores."""
        weights, hyper = self.weights, self.weights.hyperparameters
        positions = self.n_tokens + np.arange(tokens.size)
        n_hidden = max(
            cache.hidden(head).size for cache in self._caches for head in range(cache.n_head_kv)
        )
        self._heads.prepare(tokens.size, n_hidden)
        self.smallest_search_margin = min(self.smallest_search_margin, self._heads.margin)
        x = weights.embedding[tokens]
        found: list[list[tuple[IntArray, FloatArray]]] = []
        for il, (layer, cache) in enumerate(zip(weights.layers, self._caches, strict=True)):
            normed = rms_norm(x, layer.attention_norm, hyper.rms_epsilon)
            mixed, of_layer = self._attention(normed, positions, il, layer, cache)
            found.append(of_layer)
            x = x + mixed
            normed = rms_norm(x, layer.ffn_norm, hyper.rms_epsilon)
            x = x + swiglu(normed, layer)
        self.n_tokens += tokens.size
        self._n_rows += tokens.size
        for group in zip(*found, strict=True):
            positions_found, shares = zip(*group, strict=True)
            self.found = Retrieved(np.stack(positions_found), np.stack(shares))
            self._retrieval.add(self.found)
            self._heads.add(self.found)
        normed = rms_norm(x, weights.output_norm, hyper.rms_epsilon)
        logits: FloatArray = normed @ weights.output.T
        return logits

    def _attention(
        self, x: FloatArray, positions: IntArray, il: int, layer: LayerWeights, cache: LayerCache
    ) -> tuple[FloatArray, list[tuple[IntArray, FloatArray]]]:
        """Attention block: x [n_tokens, n_embd] to [n_tokens, n_embd], over the layer's rows.

        Also returns for each group of tokens that searched together the retrieved positions
        [n_head_kv, n_found], and the attention to them, [n_head, n_tokens, n_found].
        """
        hyper = self.weights.hyperparameters
        rotary = positions - self._shift
        queries = self._rope.place(split_heads(x @ layer.query.T, hyper.n_head), rotary)
        keys = self._rope.place(split_heads(x @ layer.key.T, hyper.n_head_kv), rotary)
        values = split_heads(x @ layer.value.T, hyper.n_head_kv)
        cache.append(keys, values, positions, rotary)

        n_stored = cache.row_positions.shape[1]
        outputs, probabilities, found = [], [], []
        for together, rows in search_chunk(
            cache,
            queries,
            positions,
            heads=self._heads,
            layer=il,
            shift=self._shift,
            rotate=self._rope.rotate,
        ):
            visible = cache.visible(positions[together])
            is_row = np.broadcast_to(
                (rows.positions >= 0)[:, None], (*visible.shape[:2], rows.positions.shape[1])
            )
            of_tokens, paid = attend(
                queries[:, together],
                np.concatenate([cache.keys, rows.keys], axis=1).astype(x.dtype),
                np.concatenate([cache.values, rows.values], axis=1).astype(x.dtype),
                np.concatenate([visible, is_row], axis=2),
            )
            self.smallest_search_margin = min(self.smallest_search_margin, rows.margin)
            outputs.append(of_tokens)
            # attention collected by retrieved rows is dropped
            probabilities.append(paid[..., :n_stored])
            found.append((rows.positions, paid[..., n_stored:]))
        self._observe(cache, queries, np.concatenate(probabilities, axis=1), positions)
        joined = np.concatenate(outputs, axis=1).swapaxes(0, 1).reshape(positions.size, -1)
        return joined @ layer.attention_output.T, found

    def _observe(
        self,
        cache: LayerCache,
        queries: FloatArray,
        probabilities: FloatArray,
        positions: IntArray,
    ) -> None:
        """Collect the policy's inputs for the next compaction."""
        policy, n_head_kv = self.policy, self.weights.hyperparameters.n_head_kv
        if "attention" in policy.needs:
            credited = self._credited(cache, probabilities, positions)
            cache.add_scores(collected_attention(credited, n_head_kv))
        if "squares" in policy.needs:
            cache.add_squares(collected_squares(probabilities, n_head_kv))
        cache.record_queries(queries, positions, positions - self._shift)

    def _credited(
        self, cache: LayerCache, probabilities: FloatArray, positions: IntArray
    ) -> FloatArray:
        """Return [n_head, n_queries, n_rows] probabilities, weighted for the policy."""
        policy = self.policy
        if not policy.n_near or self.eviction is None:
            return probabilities
        near = min(policy.n_near, self.eviction.recent)
        # Later queries have more weight until the next compaction reduces all sums.
        with np.errstate(over="ignore"):  # a half-life may be as short as the smallest float
            exponent = (positions - self._newest_forgotten) / (policy.half_life or math.inf)
        first_near = np.maximum(positions - near + 1, self._first_removable - 1)
        is_near = cache.row_positions[:, None, :] >= first_near[None, :, None]
        credit = np.where(is_near, 0, np.exp2(exponent)[None, :, None])
        group = probabilities.shape[0] // credit.shape[0]
        credited: FloatArray = probabilities * np.repeat(credit, group, axis=0)
        return credited
