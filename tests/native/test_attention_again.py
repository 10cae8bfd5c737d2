"""Policies that attend to rows outside the graph compute the model's attention.

The oracle is the model itself with a cache for the whole text: the scores that its rows collected
from the last queries. So the test covers any architecture, not only the one in the NumPy reference.
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

# All architectures with eviction: kinds of rotation, normalization and scaling.
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
    """Write a model with one query head per KV head, so that the scores of rows are not means."""
    arch_variant, long_window, _ = request.param.partition("_in_a_long_window")
    return write_tiny_gguf(
        tmp_path / "tiny.gguf",
        seed=3,
        n_layer=N_LAYER,
        n_head=N_HEAD,
        n_head_kv=N_HEAD,
        # longer than the window, 600 tokens: LongRoPE then uses the factors for long contexts
        n_ctx_train=1024 if long_window else 4096,
        arch_variant=arch_variant,
    )


def collected_scores(llm: Llama) -> FloatArray:
    """Return scores [n_layer, n_head, n_tokens] of a text without evictions."""
    return np.array([llm.kv_rows(layer)[1] for layer in range(N_LAYER)])


def attention_of_last(path: Path, tokens: list[int]) -> FloatArray:
    """Return the attention of the last query to each token, [n_layer, n_head, n_tokens]."""
    with tiny_llama(path, **ROOMY) as llm:
        llm.eval(tokens[:-1])
        before = np.pad(collected_scores(llm), [(0, 0), (0, 0), (0, 1)])
        llm.eval(tokens[-1:])
        shares: FloatArray = collected_scores(llm) - before
    np.testing.assert_allclose(shares.sum(axis=2), 1, atol=1e-4)
    return shares


def test_policies_outside_the_graph_compute_the_models_attention(
    path: Path, rng: np.random.Generator
) -> None:
    """Their scores equal the last query's attention. Grok caps its logits."""
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
