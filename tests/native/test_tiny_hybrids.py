"""The tiny models with recurrent layers, M-RoPE and latent rows: each layer of theirs matters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

from tiny_gguf import write_tiny_gguf
from tiny_hybrids import HYBRIDS
from tiny_latent import LATENT
from tiny_llama import tiny_llama

VARIANTS = [*HYBRIDS, *LATENT]
N_LAYER, N_VOCAB, N_TOKENS = 4, 384, 300

# Layers of `N_LAYER` that keep a state; one that only feeds forward is in neither.
RECURRENT = {
    "qwen35": [0, 1, 2],
    "qwen35moe": [0, 1, 2],
    "qwen3next": [0, 1, 2],
    "lfm2": [0, 2],
    "granitehybrid": [0, 2],
    "jamba": [0, 2],
    "nemotron_h": [0, 3],
    "falcon-h1": [0, 1, 2, 3],
    "kimi-linear": [0, 1, 2],
}
ATTENDING = {
    "qwen35": [3],
    "qwen35moe": [3],
    "qwen3next": [3],
    "lfm2": [1, 3],
    "granitehybrid": [1, 3],
    "jamba": [1, 3],
    "nemotron_h": [1],
    "kimi-linear": [3],
}
# What a recurrent layer computes its output with, where that is not "ssm_out".
RECURRENT_OUTPUT = {"lfm2": r"shortconv\.out_proj", "kimi-linear": "attn_output"}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path, variant: str) -> Path:
    return write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=1, n_layer=N_LAYER, n_vocab=N_VOCAB, arch_variant=variant
    )


@pytest.fixture
def text(rng: np.random.Generator) -> list[int]:
    return rng.integers(3, N_VOCAB, N_TOKENS).tolist()


def logits_of(path: Path, text: Sequence[int]) -> npt.NDArray[np.float32]:
    """With the full cache, in ubatches. [n_tokens, n_vocab]"""
    settings = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 64, "logits_all": True}
    with tiny_llama(path, evict=False, **settings) as llm:
        llm.eval(text)
        return llm.scores[: len(text)].copy()


def silence(path: Path, pattern: str) -> int:
    """Set all tensors to zero whose name is so, and return how many there are."""
    tensors = [
        tensor for tensor in GGUFReader(path, "r+").tensors if re.fullmatch(pattern, tensor.name)
    ]
    for tensor in tensors:
        tensor.data[:] = 0
    return len(tensors)


def in_layers(layers: Sequence[int], name: str) -> str:
    """The pattern of such weights in these layers."""
    return rf"blk\.({'|'.join(map(str, layers))})\.{name}\.weight"


def mean_difference(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    return float(np.abs(one - other).mean())


def test_logits_depend_on_the_whole_text(path: Path, text: list[int]) -> None:
    logits = logits_of(path, text)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std(axis=-1).mean() < 1.5
    assert mean_difference(logits[-1], logits[-50]) > 0.2
    text[5] = 3 + (text[5] + 1) % (N_VOCAB - 3)
    assert mean_difference(logits[-1], logits_of(path, text)[-1]) > 1e-3


def test_recurrent_layers_and_attention_matter(path: Path, variant: str, text: list[int]) -> None:
    logits = logits_of(path, text)
    attending = ATTENDING.get(variant, range(N_LAYER))
    recurrent = RECURRENT.get(variant, [])
    recurrent_output = RECURRENT_OUTPUT.get(variant, "ssm_out")
    whole = path.read_bytes()
    for layers, name in ((attending, "attn_output"), (recurrent, recurrent_output)):
        path.write_bytes(whole)
        assert silence(path, in_layers(layers, name)) == len(layers)
        if layers:
            assert mean_difference(logits[100:], logits_of(path, text)[100:]) > 0.2
