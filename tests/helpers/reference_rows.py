"""The reference's rows for any architecture, from probabilities of llama.cpp's full cache."""

from __future__ import annotations

import copy

import llama_cpp
import numpy as np

import checkout  # noqa: F401
from pyh2o import Llama
from pyh2o.policies import parse_policy
from research.reference.attention import collected_attention
from research.reference.cache import LayerCache
from research.reference.compaction import compact
from research.reference.eviction import EvictionParameters

# Tokens whose scores show which layers share rows.
N_PROBE = 8


def last_logits(llm: llama_cpp.Llama) -> np.ndarray:
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    logits: np.ndarray = np.ctypeslib.as_array(pointer, (llm.n_vocab(),)).copy()
    return logits


def read_chunks(llm: llama_cpp.Llama, tokens: list[int], size: int) -> np.ndarray:
    """Return the logits after each chunk."""
    logits = []
    for start in range(0, len(tokens), size):
        llm.eval(tokens[start : start + size])
        logits.append(last_logits(llm))
    return np.array(logits)


class ReferenceRows:
    """Selects the NumPy reference's rows of each evicted layer from given probabilities."""

    def __init__(self, llm: Llama, eviction: EvictionParameters, clear_margin: float) -> None:
        self.eviction = eviction
        self.clear_margin = clear_margin
        self.n_tokens = 0
        self.caches: dict[int, LayerCache] = {}  # layers with their own rows
        self.own: dict[int, int] = {}  # the layer whose rows an evicted layer uses
        llm.eval(np.random.default_rng(1).integers(3, llm.n_vocab(), N_PROBE).tolist())
        seen: dict[bytes, int] = {}
        for layer in range(llm.text.n_layer):
            positions, scores = llm.kv_rows(layer)
            if positions.size:
                self.own[layer] = seen.setdefault(scores.tobytes(), layer)
                self.caches.setdefault(self.own[layer], LayerCache(len(positions), 1))
        llm.reset()

    def make_room(self, n_new: int) -> None:
        caches = list(self.caches.values())
        self._before = copy.deepcopy(self.caches)
        self._is_clear = True
        if caches[0].n_rows + n_new > self.eviction.capacity:
            smallest = compact(caches, self.eviction, parse_policy("h2o"), np.ones(1))
            self._is_clear = smallest > self.clear_margin
        self._append(n_new)
        self.n_tokens += n_new

    def _append(self, n_new: int) -> None:
        positions = np.arange(self.n_tokens, self.n_tokens + n_new)
        for cache in self.caches.values():
            nothing = np.zeros((cache.n_head_kv, n_new, 1), dtype=np.float32)
            cache.append(nothing, nothing, positions)

    def check_rows(self, llm: Llama) -> None:
        """Check for the same rows; after a close choice, adopt the other rows."""
        if not self._is_clear:
            self._follow(llm)
        for layer, own in self.own.items():
            positions, _ = llm.kv_rows(layer)
            for head, of_head in enumerate(positions):
                np.testing.assert_array_equal(of_head, self.caches[own].positions(head))

    def _follow(self, llm: Llama) -> None:
        n_new = next(iter(self.caches.values())).n_rows - self.eviction.budget
        self.caches, self.n_tokens = self._before, self.n_tokens - n_new
        for layer, cache in self.caches.items():
            rows = llm.kv_rows(layer)[0]
            cache.keep(
                [
                    np.flatnonzero(np.isin(cache.positions(head), rows[head]))
                    for head in range(cache.n_head_kv)
                ]
            )
        self._append(n_new)
        self.n_tokens += n_new

    def visible(self) -> dict[int, list[np.ndarray]]:
        return {
            layer: [self.caches[own].positions(head) for head in range(self.caches[own].n_head_kv)]
            for layer, own in self.own.items()
        }

    def collect(self, probabilities: dict[int, np.ndarray]) -> None:
        for layer, own in self.own.items():
            cache = self.caches[own]
            collected = collected_attention(probabilities[layer], cache.n_head_kv)
            cache.add_scores(np.take_along_axis(collected, cache.row_positions, axis=1))
