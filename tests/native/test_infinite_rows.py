"""Rows with nan or infinity, e.g. from f16 overflow: attention to them gives nan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o import Llama
from reference_rows import last_logits
from state_parts import HEAD_SIZE, N_HEAD_KV, SIZES, State
from tiny_llama import kernels_here, tiny_llama

N_VOCAB, N_READ = 384, 100
ONE, MANY = 1, 20  # batch sizes, each with its own kernel
MODEL: dict[str, Any] = {"seed": 4, "n_ctx_train": 256, **SIZES}


llama_of = partial(tiny_llama, flash_attn=True, hh=30, recent=20, slack=24, n_ctx=200)


def keys_of(state: State, cell: int) -> npt.NDArray[np.float16]:
    """Return K of a cell in the first layer, to be modified; [n_head_kv * head_size]."""
    rows = state.rows[0].view(np.float16)
    size = N_HEAD_KV * HEAD_SIZE
    return rows[cell * size : (cell + 1) * size]


@pytest.fixture
def text(path: Path, rng: np.random.Generator) -> tuple[list[int], State]:
    """Return the tokens and the state after the first of them."""
    tokens: list[int] = rng.integers(0, N_VOCAB, N_READ + MANY).tolist()
    with llama_of(path) as llm:
        llm.eval(tokens[:N_READ])
        return tokens, State(llm.kv_state(), llm.kv.used)


def logits_after(llm: Llama, state: bytes, tokens: list[int]) -> npt.NDArray[np.single]:
    llm.load_kv_state(state, tokens[:N_READ])
    llm.eval(tokens[N_READ:])
    return last_logits(llm)


@pytest.mark.parametrize("values", [[np.nan], [np.inf, -np.inf]])
def test_attention_to_nan_rows_is_nan(
    path: Path, text: tuple[list[int], State], values: list[float]
) -> None:
    """They used to be ignored, which silently changed the model's output."""
    tokens, state = text
    keys_of(state, int(state.used[-3]))[:] = np.resize(values, N_HEAD_KV * HEAD_SIZE)
    for attention in (*kernels_here(path), "ops"):
        with llama_of(path, attention=attention) as llm:
            for n in (ONE, MANY):
                logits = logits_after(llm, state.bytes(), tokens[: N_READ + n])
                assert np.isnan(logits).all(), (attention, n)


def test_masked_nan_rows_change_nothing(path: Path, text: tuple[list[int], State]) -> None:
    tokens, state = text
    states = [state.bytes()]
    free = set(range(int(state.used.max()))) - set(state.used.tolist())
    assert free
    for cell in free:
        keys_of(state, cell)[:] = np.resize([np.inf, -np.inf], N_HEAD_KV * HEAD_SIZE)
    states.append(state.bytes())
    for attention in kernels_here(path):
        with llama_of(path, attention=attention) as llm:
            for n in (ONE, MANY):
                said = [logits_after(llm, each, tokens[: N_READ + n]) for each in states]
                np.testing.assert_array_equal(said[1], said[0], err_msg=f"{attention}, {n}")
