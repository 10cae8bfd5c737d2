"""Exact prefill: a prompt is read in a larger cache, which is compacted once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import assert_same_rows, chose_clearly, read, rows_of
from pyh2o import Llama
from pyh2o.cache.kv_cache import KVCache
from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import NativeError, SettingsError
from research.reference import ReferenceLlama
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, random_tokens, stored_as, tiny_llama

N_LAYER, N_VOCAB = 2, 384
SMALL: dict[str, Any] = {"n_ctx": 512, "hh": 40, "recent": 30, "pinned": 2, "slack": 50}
N_PROMPT = 700  # more than the cache has cells
MODEL: dict[str, Any] = {"seed": 6, "n_layer": N_LAYER}


exact = partial(tiny_llama, logits_all=True, prefill="exact", **SMALL)


@pytest.mark.parametrize("attention", ["auto", "ops"])
def test_exact_prefill_equals_the_reference(
    path: Path, rng: np.random.Generator, attention: str
) -> None:
    """The reference reads the prompt with enough slack that nothing is evicted, and then evicts."""
    budget = {"heavy": 40, "recent": 30, "pinned": 2}
    clear = False
    while not clear:
        tokens = random_tokens(rng, N_PROMPT)
        reference = ReferenceLlama.from_gguf(path, **budget, slack=N_PROMPT - 72)
        expected = reference.eval(tokens)
        reference.compact()
        clear = chose_clearly(reference)
    llm = exact(path, attention=attention, **EXACT_ROWS)
    llm.eval(tokens)
    np.testing.assert_allclose(llm.scores[:N_PROMPT], expected, atol=2e-4, rtol=0)
    assert_same_rows(llm.kv_rows, rows_of(reference), scores=1e-3)
    assert (llm.kv.used, llm.kv.compactions, llm.kv.cells) == (72, 1, 256)
    # and the text continues from there as in the reference
    more = random_tokens(rng, 40)
    np.testing.assert_allclose(_logits(llm, more), read(reference, more), atol=2e-4, rtol=0)


def _logits(llm: Llama, tokens: list[int]) -> np.ndarray:
    llm.eval(tokens)
    return llm.scores[llm.n_tokens - len(tokens) : llm.n_tokens]


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("flash_attn", [False, True])
def test_exact_prefill_equals_a_cache_with_as_much_slack(
    path: Path, rng: np.random.Generator, kv_type: str, flash_attn: bool
) -> None:
    """In every layout: that cache compacts at the next token, after the other has done so."""
    types: dict[str, Any] = {**stored_as(kv_type), "flash_attn": flash_attn, "n_batch": 50}
    llm = exact(path, **types)
    roomy = {**SMALL, "n_ctx": 1024, "slack": N_PROMPT - 72}
    large = tiny_llama(path, logits_all=True, **roomy, **types)
    tokens = random_tokens(rng, N_PROMPT)
    for each in (llm, large):
        each.eval(tokens)
    np.testing.assert_array_equal(llm.scores[:N_PROMPT], large.scores[:N_PROMPT])
    for token in random_tokens(rng, 20):
        for each in (llm, large):
            each.eval([token])
        np.testing.assert_allclose(
            llm.scores[llm.n_tokens - 1], large.scores[large.n_tokens - 1], atol=1e-3, rtol=0
        )
    assert_same_rows(llm.kv_rows, [large.kv_rows(layer) for layer in range(N_LAYER)], scores=1e-3)


def test_a_prompt_that_fits_is_read_normally(path: Path, rng: np.random.Generator) -> None:
    llm = exact(path)
    plain = tiny_llama(path, logits_all=True, **SMALL)
    for n in (80, 1, 30):
        tokens = random_tokens(rng, n)
        np.testing.assert_array_equal(_logits(llm, tokens), _logits(plain, tokens))


def test_memory_is_released(path: Path, rng: np.random.Generator) -> None:
    llm = exact(path)
    before = llm.kv
    seen: list[int] = []
    llm.text.prompt_progress = lambda _done, _all: seen.append(llm.kv.bytes_total)
    llm.eval(random_tokens(rng, N_PROMPT))
    assert set(seen) == {3 * before.bytes_total}  # 768 cells, not 256
    assert llm.kv.bytes_total == before.bytes_total


def test_a_long_message_keeps_the_rows_of_a_long_text(path: Path, rng: np.random.Generator) -> None:
    """Cached and pinned rows stay in the cache while the message is read."""
    llm = exact(path)
    llm.eval(random_tokens(rng, 90))
    llm.text.cache.pin(9)
    for _ in range(3):
        llm.eval(random_tokens(rng, 300))
        before = llm.kv
        assert before.pinned == 9
        llm.eval(random_tokens(rng, 1))
        for layer in range(N_LAYER):
            for kept in llm.kv_rows(layer)[0]:
                assert set(range(9)) | set(range(llm.n_tokens - 30, llm.n_tokens)) <= set(kept)
    assert llm.kv.compactions == 3  # one for each message
    assert llm.kv.used <= llm.kv.capacity
    saved = llm.save_state()
    more = random_tokens(rng, 5)
    expected = _logits(llm, more).copy()
    llm.load_state(saved)
    np.testing.assert_array_equal(_logits(llm, more), expected)


def test_a_prompt_beyond_the_trained_context_is_read(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=6, n_layer=N_LAYER, n_ctx_train=800)
    llm = exact(path, n_ctx=800)
    with pytest.raises(SettingsError, match=r"801 rows, more than the 800 positions"):
        llm.eval(random_tokens(rng, 801))
    assert llm.n_tokens == 0
    for _ in range(4):
        llm.eval(random_tokens(rng, 600))
    assert llm.kv.rebases > 1
    assert np.isfinite(llm.scores[: llm.n_tokens]).all()


def test_too_little_memory_is_refused_before_reading(path: Path, rng: np.random.Generator) -> None:
    llm = exact(path, n_ctx=100_000, hh=40, prefill_mib=1)
    llm.eval(random_tokens(rng, 20))
    with pytest.raises(SettingsError, match=r"needs \d+ MiB, more than the 1 that .* stream"):
        llm.eval(random_tokens(rng, 5000))
    assert (llm.n_tokens, llm.kv.used) == (20, 20)


def test_a_text_continues_after_an_error_during_reading(
    path: Path, rng: np.random.Generator
) -> None:
    llm = exact(path, n_batch=100)

    def interrupt(done: int, _all: int) -> None:
        if done == 300:
            raise KeyboardInterrupt

    llm.text.prompt_progress = interrupt
    tokens = random_tokens(rng, N_PROMPT)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(tokens)
    assert (llm.n_tokens, llm.kv.cells, llm.kv.used) == (300, 256, 72)
    llm.text.prompt_progress = None
    other = exact(path, n_batch=100)
    other.eval(tokens[:300])
    for each in (llm, other):
        each.eval(tokens[300:310])
    np.testing.assert_array_equal(llm.scores[300:310], other.scores[300:310])


@pytest.mark.parametrize("begins_anew", [False, True])
def test_memory_that_could_not_be_released_is_released_later(
    path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, begins_anew: bool
) -> None:
    llm, other = exact(path), exact(path)
    tokens, more = random_tokens(rng, N_PROMPT), random_tokens(rng, 20)
    shrink, failed = KVCache.shrink, list[str]()

    def fail_once(self: KVCache) -> None:
        if not failed:
            failed.append("once")
            raise NativeError(-19, "out of memory for the scores")
        shrink(self)

    other.eval(tokens)
    monkeypatch.setattr(KVCache, "shrink", fail_once)
    with pytest.raises(NativeError):
        llm.eval(tokens)
    assert llm.kv.cells > 256
    if begins_anew:
        llm.reset()
        llm.eval(tokens)
    for each in (llm, other):
        each.eval(more)
    assert llm.kv.cells == 256
    assert llm.n_tokens == N_PROMPT + 20
    end = slice(N_PROMPT, N_PROMPT + 20)
    np.testing.assert_array_equal(llm.scores[end], other.scores[end])


def test_invalid_settings_are_refused(path: Path) -> None:
    with pytest.raises(SettingsError, match="give one of stream, exact"):
        exact(path, prefill="whole")
    with pytest.raises(SettingsError, match="prefill_mib is 0"):
        exact(path, prefill_mib=0)
