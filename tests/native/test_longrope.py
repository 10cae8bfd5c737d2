"""LongRoPE has factors for short and long contexts: the window chooses, not the cell count."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from pyh2o._native import ffi, lib
from pyh2o.core.model import address
from pyh2o.errors import SettingsError, StateError
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, random_tokens, tiny_llama, tiny_parent

N_TRAINED, N_FEW = 1024, 256
HEAVY, RECENT, SLACK = 24, 20, 16
# Windows and the positions that are used; 0 is the trained context.
WINDOWS = {64: N_FEW, 256: N_FEW, 257: N_TRAINED, 1024: N_TRAINED, 3000: N_TRAINED, 0: N_TRAINED}


@pytest.fixture(params=["longrope", "llama_longrope"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Write a model whose cells, 256 in all tests, would choose the factors for short contexts."""
    return write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, n_ctx_train=N_TRAINED, arch_variant=request.param
    )


evicting = partial(tiny_llama, hh=HEAVY, recent=RECENT, slack=SLACK, **EXACT_ROWS)
# llama.cpp's full cache with our batch size
stock = partial(tiny_parent, n_batch=SLACK, logits_all=True, **EXACT_ROWS)


def read(llm: llama_cpp.Llama, tokens: list[int]) -> np.ndarray:
    llm.eval(tokens)
    logits: np.ndarray = llm.scores[llm.n_tokens - len(tokens) : llm.n_tokens].copy()
    return logits


@pytest.mark.parametrize("n_ctx", WINDOWS)
def test_the_window_chooses_the_factors_of_a_full_cache(
    path: Path, rng: np.random.Generator, n_ctx: int
) -> None:
    n_text = 50 if n_ctx == 64 else 200
    tokens = random_tokens(rng, n_text)
    logits = {}
    for window in (n_ctx, 256, 1024):
        with closing(stock(path, n_ctx=window)) as full:
            logits[window] = read(full, tokens)
    rows = {"hh": n_text - RECENT, "n_ctx": n_ctx, "n_batch": SLACK, "logits_all": True}
    for attention in ("ops", "auto"):
        with evicting(path, attention=attention, **rows) as llm:
            assert llm.kv.cells == 256
            assert llm.kv.limits.n_pos == WINDOWS[n_ctx]
            mine = read(llm, tokens)
            assert llm.kv.compactions == 0
        if attention == "ops":
            np.testing.assert_array_equal(mine, logits[n_ctx])
        else:
            np.testing.assert_allclose(mine, logits[n_ctx], atol=1e-2)
    other = 1024 if WINDOWS[n_ctx] == N_FEW else 256
    assert np.abs(logits[n_ctx] - logits[other]).max() > 0.1


@pytest.mark.parametrize("n_ctx", [256, 300])
def test_a_state_resumes_only_with_the_same_factors(
    path: Path, rng: np.random.Generator, n_ctx: int
) -> None:
    tokens, more = random_tokens(rng, 600), random_tokens(rng, 60)
    settings = {"attention": "ops", "logits_all": True}
    with evicting(path, n_ctx=n_ctx, **settings) as llm:
        llm.eval(tokens)
        state = llm.kv_state()
        expected = read(llm, more)
    with evicting(path, n_ctx=n_ctx, **settings) as llm:
        llm.load_kv_state(state, tokens)
        np.testing.assert_array_equal(read(llm, more), expected)
    with (
        evicting(path, n_ctx=556 - n_ctx, **settings) as llm,
        pytest.raises(StateError, match="other settings"),
    ):
        llm.load_kv_state(state, tokens)


def test_exact_prefill_stays_within_the_positions_of_the_factors(
    path: Path, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, 400)
    with (
        evicting(path, n_ctx=256, prefill="exact") as llm,
        pytest.raises(SettingsError, match=f"more than the {N_FEW} positions"),
    ):
        llm.eval(tokens)
    with closing(stock(path, n_ctx=300)) as full:
        expected = read(full, tokens[:300])
    with evicting(path, n_ctx=300, prefill="exact", attention="ops", logits_all=True) as llm:
        np.testing.assert_allclose(read(llm, tokens[:300]), expected, atol=2e-4)


def test_a_refused_context_is_unchanged(path: Path) -> None:
    """llama.cpp chooses by this number alone."""
    with closing(stock(path, n_ctx=256)) as full:
        context = ffi.cast("struct llama_context *", address(full.ctx))
        policy = ffi.new("char[]", b"h2o")
        params = {"heavy": 100, "recent": 100, "slack": 50, "policy": policy}
        for n_pos, status, n_ctx_seq in (
            (200, lib.LLAMA_H2O_ERR_N_POS, 256),
            (0, lib.LLAMA_H2O_OK, N_TRAINED),
        ):
            given = ffi.new("struct llama_h2o_params *", {**params, "n_pos": n_pos})
            assert lib.llama_h2o_attach(context, given[0]) == status
            assert llama_cpp.llama_n_ctx_seq(full.ctx) == n_ctx_seq
    assert lib.llama_h2o_n_pos(ffi.NULL, 256) == 0
