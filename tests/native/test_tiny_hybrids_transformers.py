"""The tiny hybrids compute in llama.cpp what Hugging Face's transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hybrids_in_transformers
import latent_in_transformers
from in_transformers import transformers_logits
from needed import needed
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, tiny_llama

needed("torch", install="'.[compare]'")
transformers = needed("transformers", install="'.[compare]'")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("needs transformers 5", allow_module_level=True)

N_TOKENS = 150
ARCHITECTURES = hybrids_in_transformers.HYBRIDS | latent_in_transformers.LATENT
# llama.cpp scales by these after the output matrix, transformers' models by none.
LOGIT_SCALE = {"granitehybrid": 1 / 1.25, "minicpm3": 256 / 128}


@pytest.mark.parametrize("variant", list(ARCHITECTURES))
def test_full_cache_computes_what_transformers_does(
    tmp_path: Path, rng: np.random.Generator, variant: str
) -> None:
    architecture = ARCHITECTURES[variant]
    if not hasattr(transformers, architecture.model):
        pytest.skip(f"needs a newer transformers, with {architecture.model}")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, n_layer=4, arch_variant=variant)
    text = rng.integers(3, 384, N_TOKENS).tolist()
    with tiny_llama(
        path, evict=False, n_ctx=256, n_ubatch=64, logits_all=True, **EXACT_ROWS
    ) as llm:
        llm.eval(text)
        logits = llm.scores[:N_TOKENS].copy()
    expected = transformers_logits(path, architecture, text) * LOGIT_SCALE.get(variant, 1.0)
    np.testing.assert_allclose(logits, expected, atol=3e-4, rtol=0)
