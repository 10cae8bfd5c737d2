"""States of the KV cache: a loaded state continues bit for bit like the saved text."""

from __future__ import annotations

import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from oracle import assert_same_steps, clear_steps
from pyh2o.core.parameters import KV_TYPES
from pyh2o.core.states import HEADER_BYTES
from pyh2o.errors import SettingsError, StateError
from reference_rows import last_logits
from research.reference import ReferenceLlama
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, assert_same_future, random_tokens, stored_as, tiny_llama

N_LAYER, N_VOCAB = 2, 384
N_POS = 96
MODEL: dict[str, Any] = {"seed": 4, "n_layer": N_LAYER, "n_ctx_train": N_POS}


evicting_llama = partial(tiny_llama, hh=20, recent=12, slack=8, n_ctx=200, logits_all=True)


@pytest.mark.parametrize(
    "attention",
    [
        {"attention": "ops", "flash_attn": False},
        {"attention": "ops", "flash_attn": True},
        {"attention": "auto"},
    ],
    ids=["ops", "flash", "auto"],
)
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
def test_a_saved_state_continues_like_the_text(
    path: Path, rng: np.random.Generator, kv_type: str, attention: dict[str, Any]
) -> None:
    """Before and after the first compaction and re-base, after a removed tail, and pinned."""
    types = {**stored_as(kv_type), **attention}
    saved = evicting_llama(path, **types)
    saved.eval(random_tokens(rng, 7))
    saved.text.cache.pin(7)
    for n_more in (1, 30, 9, 61, 200):
        saved.eval(random_tokens(rng, n_more))
        n_back = int(rng.integers(0, 6))
        assert saved.text.remove_tail(saved.n_tokens - n_back)

        loaded = evicting_llama(path, **types)
        loaded.eval(random_tokens(rng, 50))  # the previous content must not matter
        loaded.load_kv_state(saved.kv_state(), saved.input_ids[: saved.n_tokens])
        np.testing.assert_array_equal(
            loaded.input_ids[: loaded.n_tokens], saved.input_ids[: saved.n_tokens]
        )
        assert_same_future(saved, loaded, random_tokens(rng, 25))
        assert loaded.kv.pinned == 7
    assert saved.kv.rebases > 1


@pytest.mark.parametrize("variant", ["llama", "gemma2", "lfm2"])
def test_the_state_of_an_empty_text_empties_the_cache(
    tmp_path: Path, rng: np.random.Generator, variant: str
) -> None:
    """Also in the native library, which is not asked to clear the cache first."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=4, n_layer=N_LAYER, n_ctx_train=N_POS, arch_variant=variant
    )
    used, new = (evicting_llama(path, recall=0) for _ in range(2))
    used.eval(random_tokens(rng, 30))
    used.text.cache.load_state(new.text.cache.state(), 0)
    used.n_tokens = 0
    assert used.kv_state() == new.kv_state()
    tokens = random_tokens(rng, 10)
    for llm in (used, new):
        llm.eval(tokens)
    np.testing.assert_array_equal(last_logits(used), last_logits(new))


@pytest.mark.parametrize("settings", [{}, {"hh": 60, "recall": 40}], ids=["", "recall"])
def test_functions_of_the_parent_class_keep_working(
    path: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    saved, loaded = (evicting_llama(path, **settings) for _ in range(2))
    saved.eval(random_tokens(rng, 150))
    state = pickle.loads(pickle.dumps(saved.save_state()))
    assert isinstance(state, llama_cpp.LlamaState)
    loaded.load_state(state)
    np.testing.assert_array_equal(loaded.scores[:150], saved.scores[:150])
    assert loaded.kv.n_looked == 0  # the rows retrieved before were for other queries
    assert_same_future(saved, loaded, random_tokens(rng, 60))


@pytest.mark.parametrize(
    "other",
    [
        {"hh": 21},
        {"slack": 9},
        {"n_ctx": 300, "slack": 290},
        {"type_k": KV_TYPES["f32"]},
        {"flash_attn": False},
        {"evict": False},
    ],
    ids=lambda other: " ".join(other),
)
def test_a_state_of_other_settings_is_refused(
    tmp_path: Path, path: Path, rng: np.random.Generator, other: dict[str, Any]
) -> None:
    saved = evicting_llama(path)
    saved.eval(random_tokens(rng, 60))
    long = write_tiny_gguf(tmp_path / "long.gguf", seed=4, n_layer=N_LAYER, n_ctx_train=400)
    loaded = evicting_llama(long if "n_ctx" in other else path, **other)
    loaded.eval([1, 2, 3])
    other_model = "damaged, or from another model or other settings|is from another model, LoRA"
    with pytest.raises(StateError, match=other_model):
        loaded.load_kv_state(saved.kv_state(), saved.input_ids[:60])
    assert loaded.n_tokens == loaded.kv.used == 0
    loaded.eval(random_tokens(rng, 60))


@pytest.mark.parametrize("evict", [True, False])
def test_a_state_with_other_tokens_is_refused(
    path: Path, rng: np.random.Generator, evict: bool
) -> None:
    llm = evicting_llama(path, evict=evict)
    llm.eval(tokens := random_tokens(rng, 60))
    state = llm.kv_state()
    for others in (tokens[:59], [*tokens[:-1], tokens[-1] ^ 1], tokens[::-1], []):
        with pytest.raises(StateError, match=r"^the state is from another text: pass the tokens"):
            llm.load_kv_state(state, others)
        assert llm.n_tokens == 0
    llm.load_kv_state(state, tokens)


@pytest.mark.parametrize("evict", [True, False])
def test_a_state_of_other_weights_of_the_same_shape_is_refused(
    tmp_path: Path, path: Path, rng: np.random.Generator, evict: bool
) -> None:
    """Other positions are refused too; a copy of the file counts as the same model."""
    saved = evicting_llama(path, evict=evict)
    saved.eval(tokens := random_tokens(rng, 60))
    shape = {"n_layer": N_LAYER, "n_ctx_train": N_POS}
    weights = write_tiny_gguf(tmp_path / "other.gguf", seed=5, **shape)
    for file, more in ((weights, {}), (path, {"rope_freq_base": 5000.0})):
        other = evicting_llama(file, evict=evict, **more)
        for load in (
            lambda llm=other: llm.load_kv_state(saved.kv_state(), tokens),
            lambda llm=other: llm.load_state(saved.save_state()),
        ):
            with pytest.raises(StateError, match=r"^the state is from another model, LoRA adapter"):
                load()
            assert other.n_tokens == 0
    copy = evicting_llama(shutil.copy(path, tmp_path / "copy.gguf"), evict=evict)
    copy.load_kv_state(saved.kv_state(), tokens)


@pytest.mark.parametrize("evict", [True, False])
def test_a_state_of_another_version_is_refused_with_the_version(
    path: Path, rng: np.random.Generator, evict: bool
) -> None:
    llm = evicting_llama(path, evict=evict)
    llm.eval(tokens := random_tokens(rng, 60))
    state = bytearray(llm.kv_state())
    state[7] -= 1
    for data, version in ((bytes(state), 2), (bytes(llm.text.cache.state()), 1)):
        with pytest.raises(StateError, match=f"^the state has version {version}, but this pyh2o"):
            llm.load_kv_state(data, tokens)
        assert llm.n_tokens == 0
        llm.eval(tokens)
    for data in (b"", bytes(state[:50])):
        with pytest.raises(StateError, match="damaged"):
            llm.load_kv_state(data, tokens)
    if evict:  # the library has its own version
        state[7] += 1
        state[HEADER_BYTES + 8] += 1
        with pytest.raises(StateError, match="state does not fit"):
            llm.load_kv_state(bytes(state), tokens)
        assert llm.n_tokens == llm.kv.used == 0


def test_pinned_rows_equal_the_reference(path: Path, rng: np.random.Generator) -> None:
    reference = ReferenceLlama.from_gguf(path, heavy=20, recent=12, slack=8, n_pos=N_POS)
    reference.pin(11)
    steps, _ = clear_steps(reference, rng, [8] * 19)
    llm = evicting_llama(path, **EXACT_ROWS)
    llm.text.cache.pin(11)
    assert_same_steps(llm, steps, logits=5e-4, scores=1e-3)
    for layer in range(N_LAYER):
        for kept in llm.kv_rows(layer)[0]:
            assert kept[:11].tolist() == list(range(11))
    assert (llm.kv.pinned, llm.kv.heavy, llm.kv.budget) == (11, 9, 32)


def test_pins_end_with_the_text(path: Path, rng: np.random.Generator) -> None:
    llm = evicting_llama(path)
    llm.text.cache.pin(5)
    llm.eval(random_tokens(rng, 60))
    llm.reset()
    assert llm.kv.pinned == 0


def test_too_many_pins_are_refused(path: Path) -> None:
    llm = evicting_llama(path)
    llm.text.cache.pin(20)
    with pytest.raises(SettingsError, match=r"21 tokens to pin do not fit the 20 rows .* raise hh"):
        llm.text.cache.pin(21)
    evicting_llama(path, evict=False).text.cache.pin(1000)


def test_a_tail_is_removed_exactly_or_refused(path: Path, rng: np.random.Generator) -> None:
    llm = evicting_llama(path)
    llm.eval(random_tokens(rng, 100))
    first = next(n for n in range(101) if n and llm.text.can_remove_tail(n))
    assert 100 - 12 - 8 < first <= 100 - 12 + 1
    assert not llm.text.remove_tail(first - 1)
    assert llm.n_tokens == 100
    assert llm.text.remove_tail(first)
    assert llm.n_tokens == first
    loaded = evicting_llama(path)
    loaded.load_kv_state(llm.kv_state(), llm.input_ids[:first])
    assert_same_future(llm, loaded, random_tokens(rng, 20))
    assert llm.text.remove_tail(0)
    assert llm.kv.used == 0
    with pytest.raises(ValueError, match="the text has 0 tokens"):
        llm.text.remove_tail(1)


def test_a_new_text_resets_the_counters(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=N_LAYER)
    llm = tiny_llama(path, hh=12, recent=9, slack=7)
    llm.eval(rng.integers(0, 300, 100).tolist())
    assert llm.kv.compactions > 5
    llm.reset()
    llm.eval([1, 2, 3])
    kv = llm.kv
    assert (kv.compactions, kv.tokens_evicted, kv.rows_moved, kv.compaction_seconds) == (0, 0, 0, 0)
