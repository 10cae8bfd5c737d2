"""The NumPy reference of the whole model against simpler implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from research.reference import LlamaWeights, ReferenceLlama, read_gguf
from tiny_gguf import write_tiny_gguf

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

# The tiny models' logits have standard deviation 1; float32 rounding changes them by 1e-5.
ROUNDING = 1e-4


@pytest.fixture
def tiny(tmp_path: Path, seed: int) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed)


def random_tokens(rng: np.random.Generator, n_tokens: int) -> IntArray:
    return rng.integers(3, 384, n_tokens)


def full_attention_logits(weights: LlamaWeights, tokens: IntArray) -> FloatArray:
    """Run a Llama without a cache in float64, written from the papers without the reference's code.

    Pairs of elements are complex numbers, which RoPE rotates; every KV head is repeated.
    """
    hyper = weights.hyperparameters
    n_tokens, size = len(tokens), hyper.head_size
    turns = np.exp(
        1j * np.outer(np.arange(n_tokens), hyper.rope_base ** (-np.arange(0, size, 2) / size))
    )

    def norm(x: FloatArray, weight: FloatArray) -> FloatArray:
        scaled: FloatArray = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + hyper.rms_epsilon)
        return scaled * weight

    def heads(x: FloatArray, turned: bool) -> FloatArray:
        split = x.reshape(n_tokens, -1, size)
        if turned:
            complex_pairs = (split[..., 0::2] + 1j * split[..., 1::2]) * turns[:, None]
            split = np.stack([complex_pairs.real, complex_pairs.imag], axis=-1)
        repeats = hyper.n_head * size // x.shape[1]
        return np.repeat(split.reshape(n_tokens, -1, size), repeats, axis=1)

    x = weights.embedding[tokens].astype(np.float64)
    for layer in weights.layers:
        h = norm(x, layer.attention_norm)
        query, key = heads(h @ layer.query.T, True), heads(h @ layer.key.T, True)
        logits = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(size)
        logits[:, np.triu(np.ones((n_tokens, n_tokens), dtype=bool), 1)] = -np.inf
        attention = np.exp(logits)
        attention /= attention.sum(axis=2, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", attention, heads(h @ layer.value.T, False))
        x = x + mixed.reshape(n_tokens, -1) @ layer.attention_output.T
        h = norm(x, layer.ffn_norm)
        gate = h @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer.up.T)) @ layer.down.T
    result: FloatArray = norm(x, weights.output_norm) @ weights.output.T
    return result


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_head_kv": 4},
        {"n_head_kv": 1},
        {"n_head": 6, "n_head_kv": 3, "head_size": 16, "n_layer": 2},
        {"tied_output": True},
    ],
)
def test_a_budget_above_the_text_gives_plain_attention(
    tmp_path: Path, seed: int, rng: np.random.Generator, shape: dict[str, Any]
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed, **shape)
    tokens = random_tokens(rng, 150)
    expected = full_attention_logits(read_gguf(path, dtype=np.float64), tokens)

    model = ReferenceLlama.from_gguf(path, heavy=100, recent=49, pinned=1, slack=32)
    logits = model.eval(tokens)

    assert model.n_compactions == 0
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=ROUNDING)
    exact = ReferenceLlama.from_gguf(path, dtype=np.float64, cache_dtype=np.float64)
    np.testing.assert_allclose(exact.eval(tokens), expected, atol=1e-9)


def test_eviction_changes_the_logits(tiny: Path, rng: np.random.Generator) -> None:
    """The tiny model depends on its history; otherwise no test would notice a missing row."""
    tokens = random_tokens(rng, 150)
    full = ReferenceLlama.from_gguf(tiny).eval(tokens)
    evicting = ReferenceLlama.from_gguf(tiny, heavy=16, recent=16).eval(tokens)

    np.testing.assert_allclose(evicting[:33], full[:33], atol=ROUNDING)
    assert (np.abs(evicting - full)[40:].max(axis=1) > 100 * ROUNDING).all()
