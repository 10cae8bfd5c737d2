"""Rows that are no numbers, as where f16 is too small for them: what sees them is none either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o import Llama
from pyh2o.cache.settings import Attention
from reference_rows import last_logits
from state_parts import HEAD_SIZE, N_HEAD_KV, SIZES, State
from tiny_llama import kernels_here, tiny_llama

N_VOCAB, N_READ = 384, 100
ONE, MANY = 1, 20  # tokens that are read at once: each has a kernel of its own
MODEL: dict[str, Any] = {"seed": 4, "n_ctx_train": 256, **SIZES}


def llama_of(path: Path, attention: Attention = "auto") -> Llama:
    sizes: dict[str, Any] = {"hh": 30, "recent": 20, "slack": 24, "n_ctx": 200}
    return tiny_llama(path, attention=attention, flash_attn=True, **sizes)


def keys_of(state: State, cell: int) -> npt.NDArray[np.float16]:
    """K of a cell in the first layer, to be changed; [n_head_kv * head_size]."""
    rows = state.rows[0].view(np.float16)
    size = N_HEAD_KV * HEAD_SIZE
    return rows[cell * size : (cell + 1) * size]


def test_attention_over_them_is_no_number(path: Path, rng: np.random.Generator) -> None:
    """It was one: they counted nothing, and the model said something else in silence."""
    tokens: list[int] = rng.integers(0, N_VOCAB, N_READ + MANY).tolist()
    with llama_of(path) as llm:
        llm.eval(tokens[:N_READ])
        saved, n_used = llm.kv_state(), llm.kv.used
    for values in ([np.nan], [np.inf, -np.inf]):
        state = State(saved, n_used)
        seen = int(rng.choice(state.used))
        keys_of(state, seen)[:] = np.resize(values, N_HEAD_KV * HEAD_SIZE)
        for attention in (*kernels_here(path), "ops"):
            with llama_of(path, attention) as llm:
                for n in (ONE, MANY):
                    llm.load_kv_state(state.bytes(), tokens[:N_READ])
                    llm.eval(tokens[N_READ : N_READ + n])
                    assert np.isnan(last_logits(llm)).all(), (attention, n, values)


def test_those_that_are_masked_change_nothing(path: Path, rng: np.random.Generator) -> None:
    tokens: list[int] = rng.integers(0, N_VOCAB, N_READ + MANY).tolist()
    with llama_of(path) as llm:
        llm.eval(tokens[:N_READ])
        saved, n_used = llm.kv_state(), llm.kv.used
    state = State(saved, n_used)
    free = set(range(int(state.used.max()))) - set(state.used.tolist())
    assert free
    for cell in free:
        keys_of(state, cell)[:] = np.resize([np.inf, -np.inf], N_HEAD_KV * HEAD_SIZE)
    for attention in kernels_here(path):
        with llama_of(path, attention) as llm:
            for n in (ONE, MANY):
                said = []
                for each in (saved, state.bytes()):
                    llm.load_kv_state(each, tokens[:N_READ])
                    llm.eval(tokens[N_READ : N_READ + n])
                    said.append(last_logits(llm))
                np.testing.assert_array_equal(said[1], said[0], err_msg=f"{attention}, {n}")
