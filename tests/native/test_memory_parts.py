"""Eviction in caches of several parts: windows, recurrent states, layers that share rows.

Also features that the NumPy reference does not compute.
"""

from __future__ import annotations

import ctypes
from contextlib import closing
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from masked import MaskedLlama
from oracle import CLEAR_MARGIN
from pyh2o.cache.native import MAX_POSITIONS
from reference_rows import ReferenceRows, last_logits, read_chunks
from research.reference.eviction import EvictionParameters
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, random_tokens, tiny_llama, tiny_parent
from tiny_windowed import WINDOWED

N_TEXT = 220
CHUNK = 8

# Layers that cover a variant's features; the last windowed layer attends to the whole text.
N_LAYER = dict.fromkeys(WINDOWED, 4) | {
    "gemma3n": 22,
    "gemma4": 6,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next", "lfm2", "granitehybrid"), 4),
    **dict.fromkeys(("jamba", "nemotron_h", "kimi-linear"), 4),
    **dict.fromkeys(("falcon-h1", "mla", "qwen2vl", "qwen3vl", "longrope"), 3),
}
# The window of all tests, 512 tokens, exceeds this model's original context of 256 tokens, which
# is also the number of cells.
LONG_WINDOW = "longrope_in_a_long_window"
HEAVY, RECENT, SLACK = 40, 24, 16

# Amplifies rounding so much that its logits say little: llama.cpp's own two attention paths
# differ by 8. Its rows are chosen by attention that differs by up to 5 %.
CHAOTIC = "gemma3n"


@pytest.fixture(scope="module", params=[*N_LAYER, LONG_WINDOW])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = str(request.param)
    file = tmp_path_factory.mktemp(variant) / f"{variant}.gguf"
    if variant == LONG_WINDOW:
        return write_tiny_gguf(file, seed=3, arch_variant="longrope", n_ctx_train=1024)
    return write_tiny_gguf(file, seed=3, arch_variant=variant, n_layer=N_LAYER[variant])


evicting = partial(tiny_llama, hh=HEAVY, recent=RECENT, slack=SLACK, n_ctx=512, **EXACT_ROWS)


read = partial(read_chunks, size=CHUNK)


def assert_alike(logits: np.ndarray, expected: np.ndarray, path: Path, *, atol: float) -> None:
    """Compare [n, n_vocab] up to rounding, which can route a token to another expert."""
    difference = np.abs(logits - expected)
    if path.stem != CHAOTIC:
        assert np.mean(difference.max(axis=1) < atol) > 0.9


def test_a_budget_that_covers_the_text_changes_nothing(
    path: Path, rng: np.random.Generator
) -> None:
    """Bit for bit with ggml's ops, up to rounding with ours."""
    cells = {"n_ctx": 512, "n_batch": SLACK, "n_ubatch": SLACK, "swa_full": False}
    with closing(tiny_parent(path, **EXACT_ROWS, **cells)) as parent:
        tokens = random_tokens(rng, N_TEXT)
        expected = read(parent, tokens)
    with closing(tiny_parent(path, **EXACT_ROWS, **cells, flash_attn=True)) as parent:
        rounding = np.abs(read(parent, tokens) - expected).max()
    covering = {"hh": 216, "recent": RECENT, "slack": SLACK, "n_batch": SLACK}
    for attention in ("ops", "auto"):
        with evicting(path, **covering, attention=attention) as llm:
            logits = read(llm, tokens)
            assert llm.kv.compactions == 0
        if attention == "ops":
            np.testing.assert_array_equal(logits, expected)
        else:
            # as far apart as llama.cpp's own two paths, which round to f16 at different points
            np.testing.assert_allclose(logits, expected, atol=1e-2 + 2 * rounding)


def test_rows_are_evicted_as_in_the_reference_and_equal_masked_rows(
    path: Path, rng: np.random.Generator
) -> None:
    eviction = EvictionParameters(heavy=HEAVY, recent=RECENT, slack=SLACK)
    clear = 0.05 if path.stem == CHAOTIC else CLEAR_MARGIN
    with evicting(path, attention="ops") as llm, MaskedLlama(path, n_ctx=512, n_batch=64) as masked:
        reference = ReferenceRows(llm, eviction, clear)
        for _ in range(0, N_TEXT, CHUNK):
            tokens = random_tokens(rng, CHUNK)
            reference.make_room(CHUNK)
            llm.eval(tokens)
            reference.check_rows(llm)
            masked.visible = reference.visible()
            masked.eval(tokens)
            reference.collect(masked.probabilities)
            assert_alike(last_logits(llm)[None], last_logits(masked)[None], path, atol=1e-3)
        assert llm.kv.compactions > 3


def test_a_rebase_rotates_the_window_too(path: Path, rng: np.random.Generator) -> None:
    """If all rows move back by the same distance, only rounding changes."""
    budget = {"policy": "streaming", "hh": 0, "recent": 40, "attention": "ops", "n_ctx": 512}
    with evicting(path, **budget) as llm:
        if llm.text.position_limit < MAX_POSITIONS:
            pytest.skip("this model has no re-base")
        tokens = random_tokens(rng, 300)
        expected = read(llm, tokens)
        assert llm.kv.rebases == 0
        key = f"{llm.metadata['general.architecture']}.context_length"
    n_pos = 257 if path.stem == LONG_WINDOW else 64
    with evicting(path, **budget, kv_overrides={key: n_pos}) as llm:
        logits = read(llm, tokens)
        assert llm.kv.rebases > (3 if n_pos == 64 else 0)
    assert_alike(logits, expected, path, atol=5e-3)


def test_a_removed_tail_leaves_no_trace(path: Path, rng: np.random.Generator) -> None:
    """If it cannot be removed exactly, nothing changes."""
    # up to where one more chunk fits without a compaction
    n_tokens = HEAVY + RECENT + SLACK + CHUNK + 8 * SLACK
    with evicting(path, attention="ops") as llm:
        tokens, more, other = (random_tokens(rng, n) for n in (n_tokens, CHUNK, 4 * CHUNK))
        read(llm, tokens)
        llm.text.cache.mark()
        read(llm, more)
        removed = llm.text.remove_tail(n_tokens)
        if llm.kv.bytes_recurrent:
            assert not removed
            assert llm.n_tokens == n_tokens + CHUNK
            return
        assert removed
        logits = read(llm, other)
    with evicting(path, attention="ops") as llm:
        read(llm, tokens)
        expected = read(llm, other)
    assert_alike(logits, expected, path, atol=2e-4)


def test_a_state_resumes_as_the_text_continues(path: Path, rng: np.random.Generator) -> None:
    # all evicted rows are retrieved, so that no choice is close
    finding = {"attention": "ops", "hh": HEAVY + 2 * N_TEXT, "recall": 2 * N_TEXT}
    with evicting(path, **finding) as llm:
        tokens, more = random_tokens(rng, N_TEXT), random_tokens(rng, 60)
        read(llm, tokens)
        state = llm.save_state()
        rows = [llm.kv_rows(layer) for layer in range(llm.text.n_layer)]
        expected = read(llm, more)
    with evicting(path, **finding) as llm:
        read(llm, tokens[:50])
        llm.load_state(state)
        for layer, (positions, scores) in enumerate(rows):
            now_positions, now_scores = llm.kv_rows(layer)
            np.testing.assert_array_equal(now_positions, positions)
            np.testing.assert_array_equal(now_scores, scores)
        logits = read(llm, more)
    # the rows of a window lie in other cells, so their sums round differently
    assert_alike(logits, expected, path, atol=5e-3)


def test_dropped_rows_leave_only_the_growing_part(path: Path, rng: np.random.Generator) -> None:
    """Windows and states keep what they have of them, also in a saved text."""
    with evicting(path, attention="ops") as llm:
        tokens, more = random_tokens(rng, N_TEXT), random_tokens(rng, 60)
        read(llm, tokens)
        llm.text.drop_spans([(100, 200)])
        state = llm.save_state()
        # heads had kept different numbers of the rows evicted before
        rows = [llm.kv_rows(layer)[0] for layer in range(llm.text.n_layer)]
        n_gone = np.concatenate([((of >= 100) & (of < 200)).sum(axis=1) for of in rows if of.size])
        assert n_gone.min() == 0
        expected = read(llm, more)
    with evicting(path, attention="ops") as llm:
        llm.load_state(state)
        logits = read(llm, more)
        assert llm.text.dropped_spans == [(100, 200)]
    assert_alike(logits, expected, path, atol=5e-3)


def test_a_state_of_the_window_alone_is_refused(path: Path, rng: np.random.Generator) -> None:
    """A re-base, which rotates the keys of all layers, may come between saving and loading it."""
    part = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    cells = {"n_ctx": 512, "n_batch": SLACK, "n_ubatch": SLACK, "swa_full": False}
    with closing(tiny_parent(path, **EXACT_ROWS, **cells)) as parent:
        tokens = random_tokens(rng, N_TEXT)
        read(parent, tokens)
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size_ext(parent.ctx, 0, part))()
        size = len(state)
        assert llama_cpp.llama_state_seq_get_data_ext(parent.ctx, state, size, 0, part) == size
    with evicting(path, attention="ops") as llm:
        if not llm.kv.bytes_window:
            pytest.skip("this model has no window")
        read(llm, tokens)
        before = llm.kv_state()
        assert llama_cpp.llama_state_seq_get_size_ext(llm.ctx, 0, part) == 0
        assert llama_cpp.llama_state_seq_set_data_ext(llm.ctx, state, size, 0, part) == 0
        assert llm.kv_state() == before


def test_exact_prefill_reads_the_whole_prompt(path: Path, rng: np.random.Generator) -> None:
    """Its logits equal those of the full cache, and the text continues within the budget."""
    with closing(tiny_parent(path, **EXACT_ROWS, n_ctx=512, n_batch=SLACK)) as parent:
        tokens = random_tokens(rng, N_TEXT)
        expected = read(parent, tokens)[-1]
    with evicting(path, attention="ops", prefill="exact") as llm:
        for _ in llm.generate(tokens, temp=0.0):
            break
        assert_alike(last_logits(llm)[None], expected[None], path, atol=2e-4)
        read(llm, tokens[:40])
        assert llm.kv.used <= llm.kv.capacity


@pytest.mark.parametrize("attention", ["auto", "ops"])
def test_retrieving_all_rows_equals_the_full_cache(
    path: Path, rng: np.random.Generator, attention: str
) -> None:
    """With any other part in the cache and any type of evicted rows."""

    def read_by_few_and_many(llm: llama_cpp.Llama) -> np.ndarray:
        return np.concatenate([read(llm, tokens[:128]), read(llm, tokens[128:], size=SLACK)])

    with closing(tiny_parent(path, **EXACT_ROWS, n_ctx=512, n_batch=SLACK)) as parent:
        tokens = random_tokens(rng, N_TEXT)
        expected = read_by_few_and_many(parent)
    all_of_it = {"hh": HEAVY + N_TEXT, "recall": N_TEXT, "recall_type": "f32"}
    with evicting(path, attention=attention, **all_of_it) as llm:
        logits = read_by_few_and_many(llm)
        assert llm.kv.compactions > 3
        assert llm.kv.found_share > 0
    # ggml's flash attention, used for windows and if V is a part of K, rounds to f16
    np.testing.assert_allclose(logits, expected, atol=2e-2 if attention == "auto" else 2e-3, rtol=0)
