"""The archive of the NumPy reference: what it holds, and where its rows are shown again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from pyh2o.reference import LlamaWeights, ReferenceLlama, as_float16, as_float32
from pyh2o.reference.layers import Rope, rms_norm, split_heads
from recalling import EXACT, HEADS, N_HEAD, N_HEAD_KV, random_tokens, recalling
from tiny_gguf import write_tiny_gguf

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


@pytest.fixture
def tiny(tmp_path: Path, seed: int) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed)


def rows_of_the_first_layer(
    weights: LlamaWeights, tokens: IntArray, places: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Keys and values [n_head_kv, n_tokens, head_size], which depend on no other token there.

    Args:
        weights: of the model.
        tokens: [n_tokens].
        places: [n_tokens] positions to rotate the keys to.
    """
    layer, hyper = weights.layers[0], weights.hyperparameters
    normed = rms_norm(weights.embedding[tokens], layer.attention_norm, hyper.rms_epsilon)
    keys = split_heads(normed @ layer.key.T, hyper.n_head_kv)
    values = split_heads(normed @ layer.value.T, hyper.n_head_kv)
    return Rope(weights).rotate(keys, places), values


def assert_recalled_rows(model: ReferenceLlama, tokens: IntArray, n_placed: int) -> None:
    """The first layer shows the right rows at the right places, of a text of so many tokens."""
    recalled, cache = model.recalled, model._caches[0]
    keys, values = rows_of_the_first_layer(
        model.weights, tokens, naive_places(model, np.arange(tokens.size), n_placed)
    )
    for head in range(N_HEAD_KV):
        mine = recalled.positions[0, head]
        np.testing.assert_allclose(cache.recalled_keys[head], keys[head, mine], atol=EXACT)
        np.testing.assert_allclose(cache.recalled_values[head], values[head, mine], atol=EXACT)
    for layer, head in HEADS:
        expected = naive_places(model, recalled.positions[layer, head], n_placed)
        assert recalled.places[layer, head].tolist() == expected.tolist()


def naive_places(model: ReferenceLlama, positions: IntArray, n_tokens: int) -> IntArray:
    """Of any positions, in a text of so many tokens; 0 for those outside the spans."""
    places = np.zeros_like(positions)
    assert model.eviction is not None
    n_all = sum(span.end - span.start for span in model.recalled.spans)
    distance = max((model.eviction.n_pos or 10**6) // 3, 2 * n_all)
    end = max(n_tokens - model._shift - distance, 0)
    for span in model.recalled.spans:
        start = max(span.start - model._shift, end)
        end = start + span.end - span.start
        for i, position in enumerate(positions):
            if span.start <= position < span.end:
                places[i] = start + position - span.start
    return places


@pytest.mark.parametrize("settings", [{"n_pos": 150}, {"dense": True, "heavy": 100}])
def test_after_a_rebase_spans_are_as_far_as_there_are_positions(
    tiny: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    model = recalling(tiny, slack=8, **settings)
    tokens = random_tokens(rng, 400)
    n_moved = n_placed = 0
    for token in tokens:
        before = model.recalled.places
        n_rebases = model.n_rebases
        model.eval(np.array([token]))
        if model.n_rebases > n_rebases:
            n_placed = model.n_tokens - 1
        n_moved += not np.array_equal(model.recalled.places, before)
        if model.n_tokens % 60 == 0:
            model.recall(30)
            n_placed = model.n_tokens
        if model.n_tokens % 20 == 0:
            assert_recalled_rows(model, tokens[: model.n_tokens], n_placed)
    assert n_moved > 0, "no re-base has put recalled rows anew"


def test_the_question_moves_with_the_text(tiny: Path, rng: np.random.Generator) -> None:
    """Queries that are remembered keep their distance to the rows."""
    model = recalling(tiny, slack=8, n_pos=100)
    tokens = random_tokens(rng, 160)
    for n_tokens in range(4, 161, 4):
        model.eval(tokens[n_tokens - 4 : n_tokens])
        archive, layer = model._caches[0].archive, model.weights.layers[0]
        assert archive is not None
        last = archive.queries
        assert last.positions.tolist() == list(range(max(0, n_tokens - 16), n_tokens))
        assert last.rotary_positions.tolist() == (last.positions - model._shift).tolist()
        x = model.weights.embedding[tokens[last.positions]]
        normed = rms_norm(x, layer.attention_norm, model.weights.hyperparameters.rms_epsilon)
        queries = split_heads(normed @ layer.query.T, N_HEAD)
        expected = Rope(model.weights).rotate(queries, last.rotary_positions)
        np.testing.assert_allclose(last.rotated, expected, atol=EXACT)
    assert model.n_rebases > 1


@pytest.mark.parametrize("settings", [{}, {"n_pos": 100}, {"dense": True}])
def test_archived_keys_are_where_the_text_was(
    tiny: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """The same for both heads, though each packs its older rows as it has room."""
    model = recalling(tiny, slack=8, **settings)
    tokens = random_tokens(rng, 200)
    shifts: list[int] = []
    for token in tokens:
        before = model._shift
        n_before = model.n_compactions
        model.eval([token])
        if model.n_compactions > n_before:
            n_new = model.n_tokens - 1 - 16 - len(shifts)
            shifts += [before] * n_new

    archive = model._caches[0].archive
    assert archive is not None
    assert archive.shifts.tolist() == shifts
    assert archive.n_positions == 192 - 16
    expected = np.arange(archive.n_positions) - np.array(shifts)
    keys, values = rows_of_the_first_layer(model.weights, tokens[: archive.n_positions], expected)
    np.testing.assert_allclose(archive.keys, keys, atol=EXACT)
    np.testing.assert_allclose(archive.values, values, atol=EXACT)


def test_rows_come_back_as_the_archive_rounds_them(tiny: Path, rng: np.random.Generator) -> None:
    """Once in the cache's type, once in the archive's; unturned keys are exact copies of those."""

    def as_q8_0(rows: FloatArray) -> FloatArray:
        q8_0 = GGMLQuantizationType.Q8_0
        return dequantize(quantize(rows.astype(np.float32), q8_0), q8_0) if rows.size else rows

    tokens = random_tokens(rng, 100)
    for rounding in (as_float32, as_float16, as_q8_0):
        model = ReferenceLlama.from_gguf(
            tiny,
            heavy=24,
            recent=16,
            recall_queries=16,
            cache_dtype=np.float16,
            archive_rounding=rounding,
            keep_all=True,
        )
        model.eval(tokens)
        model.recall(30)
        cache, mine = model._caches[0], model.recalled.positions[0]
        keys, values = rounding(cache.keys), rounding(cache.values)
        for head in range(N_HEAD_KV):
            np.testing.assert_array_equal(
                cache.recalled_keys[head], keys[head, mine[head]].astype(np.float16)
            )
            np.testing.assert_array_equal(
                cache.recalled_values[head], values[head, mine[head]].astype(np.float16)
            )
        assert cache.recalled_keys.dtype == np.float16
