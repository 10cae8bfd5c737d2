"""The tiny models with windows, states or latent rows run on the full cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tiny_gguf import write_tiny_gguf
from tiny_hybrids import HYBRIDS
from tiny_latent import LATENT
from tiny_llama import tiny_llama
from tiny_windowed import WANTED_LAYERS, WINDOWED

N_TEXT, CHANGED = 300, 5
N_VOCAB = 384

LAYERS = [(variant, WANTED_LAYERS.get(variant, 3)) for variant in WINDOWED]
LAYERS += [(variant, 4) for variant in (*HYBRIDS, *LATENT)]
# What tests get that ask for no number of layers. llama.cpp aborts with so few of Llama 4.
FEWER_LAYERS = [(variant, 3) for variant in WANTED_LAYERS if variant != "llama4"]


def logits_of_two(
    path: Path, rng: np.random.Generator, *, n_ctx: int = 512
) -> list[npt.NDArray[np.float32]]:
    """[N_TEXT, n_vocab] of a text that is read in parts, and of one with another early token."""
    text = rng.integers(3, N_VOCAB, N_TEXT)
    other = text.copy()
    other[CHANGED] = 3 + (text[CHANGED] + 1 - 3) % (N_VOCAB - 3)
    logits = []
    with tiny_llama(path, n_ctx=n_ctx, n_batch=64, evict=False, logits_all=True) as llm:
        for tokens in (text, other):
            llm.reset()
            llm.eval(tokens.tolist())
            logits.append(llm.scores[:N_TEXT].copy())
    return logits


@pytest.mark.parametrize(("variant", "n_layer"), LAYERS + FEWER_LAYERS)
def test_all_depends_on_the_whole_text(
    tmp_path: Path, seed: int, rng: np.random.Generator, variant: str, n_layer: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed, n_layer=n_layer, arch_variant=variant)

    first, second = logits_of_two(path, rng)

    assert np.isfinite(first).all()
    assert 0.5 < first.std(axis=1).mean() < 4
    assert first.std(axis=0).mean() > 0.3
    differences = np.abs(first - second).max(axis=1)
    assert differences[:CHANGED].max() == 0
    assert differences[CHANGED] > 0.1
    # The windows of three or four layers alone would pass nothing on so far.
    assert differences[-20:].min() > 1e-4
