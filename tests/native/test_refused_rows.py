"""Rows of a state that is refused: nothing of them may be seen in the texts that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o import Llama
from pyh2o.errors import StateError
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

N_VOCAB = 384
NOT_NUMBERS = b"\xff" * 3000  # whether they are read as f16, f32 or scales of blocks


def model(folder: Path, arch_variant: str) -> Path:
    sizes = {"n_layer": 4, "arch_variant": arch_variant}
    return write_tiny_gguf(folder / f"{arch_variant}.gguf", seed=4, **sizes)


def logits_after(llm: Llama, tokens: list[int]) -> npt.NDArray[np.single]:
    assert llm.n_tokens == 0
    llm.eval(tokens)
    return np.array(llm.scores[len(tokens) - 1])


def damaged(state: bytes) -> bytes:
    """Of what comes last: V of a layer, a window or a recurrent state."""
    return state[: -len(NOT_NUMBERS)] + NOT_NUMBERS


@pytest.mark.parametrize(
    "settings",
    [{}, {"attention": "ops", "flash_attn": False}, {"type_k": 8, "type_v": 8}],
    ids=["one op", "ops", "q8_0"],
)
@pytest.mark.parametrize("arch_variant", ["llama", "sliding_window", "qwen3next", "jamba"])
def test_a_refused_state_leaves_no_rows_that_are_no_numbers(
    tmp_path: Path, rng: np.random.Generator, arch_variant: str, settings: dict[str, Any]
) -> None:
    """They were left in empty cells, whose weight is 0: all that was read afterwards was nan."""
    path = model(tmp_path, arch_variant)
    llm = tiny_llama(path, hh=20, recent=12, slack=8, n_ctx=200, logits_all=True, **settings)
    tokens: list[int] = rng.integers(0, N_VOCAB, 30).tolist()
    expected = logits_after(llm, tokens[:5])
    assert np.isfinite(expected).all()

    llm.eval(tokens[5:])
    state = llm.kv_state()
    with pytest.raises(StateError):
        llm.load_kv_state(damaged(state), tokens)
    np.testing.assert_array_equal(logits_after(llm, tokens[:5]), expected)
