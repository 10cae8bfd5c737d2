"""Policies that look at rows outside the graph attend as the model does.

The oracle is the model itself, with room for the whole text: what its rows collected of the last
queries. So the architecture may be any, not only the one that the NumPy reference computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o import Llama
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, tiny_llama

FloatArray = npt.NDArray[np.floating[Any]]

N_LAYER, N_HEAD, N_TEXT = 2, 4, 200
HEAVY, RECENT = 24, 20

# All that can be evicted: ways to rotate, to norm and to scale.
ARCHITECTURES = (
    "llama",
    "frequency_factors",
    "yarn",
    "longrope",
    "longrope_in_a_long_window",
    "neox",
    "partial",
    "every_fourth_unrotated",
    "normed_after_rope",
    "learned_positions",
    "capped",
)

ROOMY: dict[str, Any] = {"hh": 300, "recent": 200, "n_ctx": 600, **EXACT_ROWS}
EVICTING: dict[str, Any] = {
    "hh": HEAVY,
    "recent": RECENT,
    "slack": 12,
    "n_ctx": 600,
    "prefill": "exact",
    **EXACT_ROWS,
}


@pytest.fixture(params=ARCHITECTURES)
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model with one query head for each KV head, so that what rows collect is no mean."""
    arch_variant, long_window, _ = request.param.partition("_in_a_long_window")
    return write_tiny_gguf(
        tmp_path / "tiny.gguf",
        seed=3,
        n_layer=N_LAYER,
        n_head=N_HEAD,
        n_head_kv=N_HEAD,
        # of the window, 600 tokens, LongRoPE then takes factors for many positions
        n_ctx_train=1024 if long_window else 4096,
        arch_variant=arch_variant,
    )


def collected_scores(llm: Llama) -> FloatArray:
    """[n_layer, n_head, n_tokens] while nothing is evicted."""
    return np.array([llm.kv_rows(layer)[1] for layer in range(N_LAYER)])


def attention_of_last(path: Path, tokens: list[int]) -> FloatArray:
    """[n_layer, n_head, n_tokens] the share that the last query gives each token."""
    with tiny_llama(path, **ROOMY) as llm:
        llm.eval(tokens[:-1])
        before = np.pad(collected_scores(llm), [(0, 0), (0, 0), (0, 1)])
        llm.eval(tokens[-1:])
        shares: FloatArray = collected_scores(llm) - before
    np.testing.assert_allclose(shares.sum(axis=2), 1, atol=1e-4)
    return shares


def test_policies_that_look_again_attend_as_the_model(path: Path, rng: np.random.Generator) -> None:
    """Those of the last query: their scores are what it gives. Grok caps its logits."""
    tokens = rng.integers(3, 384, N_TEXT).tolist()
    shares = attention_of_last(path, tokens)
    with tiny_llama(path, policy="snap:queries=1,pool=1", **EVICTING) as llm:
        llm.eval(tokens)
        for layer in range(N_LAYER):
            for head, (positions, scores) in enumerate(zip(*llm.kv_rows(layer), strict=True)):
                competed = positions < N_TEXT - RECENT
                assert competed.sum() == HEAVY
                np.testing.assert_allclose(
                    scores[competed], shares[layer, head, positions[competed]], atol=1e-5
                )
