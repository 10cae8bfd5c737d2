"""The tiny models with windows, and their relatives, compute what transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hf_twins import TWINS, hf_logits
from needed import needed
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, tiny_llama
from tiny_windowed import WANTED_LAYERS

torch = needed("torch", install="'.[compare]'")
transformers = needed("transformers", install="'.[compare]'")
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("needs transformers 5: configs had other names", allow_module_level=True)

N_TEXT = 150


def differences(path: Path, variant: str, text: list[int]) -> npt.NDArray[np.float32]:
    """The largest of each token's logits."""
    settings: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "evict": False, "logits_all": True}
    with tiny_llama(path, **settings, **EXACT_ROWS) as llm:
        llm.eval(text)
        ours = llm.scores[: len(text)].copy()
    theirs = hf_logits(transformers, torch, path, variant, text)
    largest: npt.NDArray[np.float32] = np.abs(ours - theirs).max(axis=1)
    return largest


@pytest.mark.parametrize("variant", TWINS)
def test_the_logits_are_the_same(
    tmp_path: Path, seed: int, rng: np.random.Generator, variant: str
) -> None:
    if not hasattr(transformers, TWINS[variant].model):
        pytest.skip(f"this version of transformers has no {TWINS[variant].model}")
    n_layer = WANTED_LAYERS.get(variant, 3)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed, n_layer=n_layer, arch_variant=variant)
    text = rng.integers(3, 384, N_TEXT).tolist()
    of_each = differences(path, variant, text)
    # Rounding to halves, as ggml's GELU does, falls to one side or the other.
    most = 1e-2 if variant.startswith(("gemma", "sliding_window")) else 1e-3
    if variant in ("gemma4_experts", "gpt_oss", "llama4"):
        # A close choice of experts may fall otherwise; the tokens behind then see a little of it.
        assert np.median(of_each) < most / 5
    else:
        assert of_each.max() < most


def test_the_logits_are_the_same_in_a_long_context(
    tmp_path: Path, seed: int, rng: np.random.Generator
) -> None:
    """Of the model that then has other frequencies."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=seed, n_ctx_train=512, arch_variant="longrope"
    )
    text = rng.integers(3, 384, N_TEXT).tolist()
    assert N_TEXT > 512 // 4
    assert differences(path, "longrope", text).max() < 1e-3
