"""Attention and scores in one op: every kernel, row type and shape gives the same results."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o import Llama
from pyh2o.cache.settings import Attention
from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import SettingsError
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, exact_kernels, kernels_here, tiny_llama

# Logits have standard deviation 1; kernels differ only in the order of additions. The
# models have one layer because a second one would already round other numbers.
ROUNDING = 1e-4
# The same with inputs rounded to bf16.
BF16 = 0.05

# Of gpt-oss, whose layer 1 attends to the whole text.
SINKS: dict[str, Any] = {"arch_variant": "gpt_oss", "n_layer": 2, "n_head": 6, "n_head_kv": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "gqa of 3": {"n_head": 6, "n_head_kv": 2},
    "gqa of 5, more than one group of queries": {"n_head": 5, "n_head_kv": 1},
    "mha": {"n_head": 4, "n_head_kv": 4},
    "rows of 3 blocks": {"n_head": 2, "n_head_kv": 1, "head_size": 96},
    "more heads in a group than few queries": {"n_head": 18, "n_head_kv": 1},
    "sinks": SINKS,
}
MODEL: dict[str, Any] = {"seed": 4, "n_layer": 1}


def result(
    path: Path, tokens: npt.NDArray[np.int64], attention: Attention, **settings: Any
) -> dict[str, npt.NDArray[Any]]:
    """Return logits, kept positions and scores after chunks of one, a few and many tokens."""
    llm = Llama(
        str(path),
        hh=30,
        recent=30,
        slack=40,
        attention=attention,
        logits_all=True,
        verbose=False,
        **{"n_threads": 1, "n_threads_batch": 1, **settings},
    )
    start = 0
    for size in (70, 1, 1, 2, 3, 5, 9, 30, 1, 40, 1, 6, 80):
        llm.eval(tokens[start : start + size].tolist())
        start += size
    assert llm.kv.compactions > 2
    positions, scores = llm.kv_rows(llm.text.n_layer - 1)
    return {"logits": llm.scores[:start].copy(), "positions": positions, "scores": scores}


def assert_same(one: dict[str, npt.NDArray[Any]], other: dict[str, npt.NDArray[Any]]) -> None:
    np.testing.assert_array_equal(one["positions"], other["positions"])
    np.testing.assert_allclose(one["logits"], other["logits"], atol=ROUNDING, rtol=0)
    np.testing.assert_allclose(one["scores"], other["scores"], atol=ROUNDING, rtol=ROUNDING)


def test_this_machine_has_its_expected_kernels(path: Path) -> None:
    here = kernels_here(path)
    assert "portable" in here
    if platform.machine() in ("aarch64", "arm64"):
        assert here == ("portable", "neon")
    else:
        assert "neon" not in here
        assert "avx2" in here or "avx512" not in here
        assert "avx512" in here or "avx512bf16" not in here


@pytest.mark.parametrize(
    ("shape", "type_k", "type_v"),
    [*((shape, each, each) for shape in SHAPES for each in KV_TYPES), ("mha", "q8_0", "f16")],
)
def test_kernels_agree(
    tmp_path: Path, path: Path, rng: np.random.Generator, shape: str, type_k: str, type_v: str
) -> None:
    """If a choice is closer than rounding, another text is sampled."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf", **{**MODEL, **SHAPES[shape]})
    types = {"type_k": KV_TYPES[type_k], "type_v": KV_TYPES[type_v]}
    portable, *others = exact_kernels(path)
    for attempt in range(3):
        tokens = rng.integers(0, 384, 300)
        expected = result(model, tokens, portable, **types)
        try:
            for kernel in others:
                assert_same(result(model, tokens, kernel, **types), expected)
            return
        except AssertionError:
            if attempt == 2:
                raise


@pytest.mark.parametrize("flash_attn", [False, True])
def test_results_are_close_to_ggmls_ops(
    path: Path, rng: np.random.Generator, flash_attn: bool
) -> None:
    """ggml rounds queries to f16 before it multiplies them with f16 rows."""
    tokens = rng.integers(0, 384, 100)
    settings: dict[str, Any] = {"hh": 60, "recent": 60, "logits_all": True}
    ours = tiny_llama(path, **settings)
    theirs = tiny_llama(path, attention="ops", flash_attn=flash_attn, **settings)
    for llm in (ours, theirs):
        llm.eval(tokens.tolist())
    np.testing.assert_allclose(ours.scores[:100], theirs.scores[:100], atol=0.02, rtol=0)
    np.testing.assert_allclose(ours.kv_rows(0)[1], theirs.kv_rows(0)[1], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("recall", [0, 12])
def test_sinks_equal_ggmls_ops(
    tmp_path: Path, path: Path, rng: np.random.Generator, recall: int
) -> None:
    """The scores of layer 1 are exact: flash attention rounds only what follows them."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf", seed=4, **SINKS)
    settings: dict[str, Any] = {"recall": recall, "recall_type": "f32", **EXACT_ROWS}
    tokens = rng.integers(0, 384, 300)
    expected = result(model, tokens, "ops", flash_attn=True, **settings)
    for kernel in exact_kernels(path):
        ours = result(model, tokens, kernel, flash_attn=True, **settings)
        np.testing.assert_allclose(ours["logits"], expected["logits"], atol=0.02, rtol=0)
        np.testing.assert_array_equal(ours["positions"], expected["positions"])
        np.testing.assert_allclose(ours["scores"], expected["scores"], ROUNDING, ROUNDING)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_many_queries_are_multiplied_in_bf16(
    tmp_path: Path, path: Path, rng: np.random.Generator, shape: str, kv_type: str
) -> None:
    """They are rounded to 8 bits before the product; few queries, such as one token's, are not."""
    if "avx512bf16" not in kernels_here(path):
        pytest.skip("this processor does not multiply bf16 numbers")
    model = write_tiny_gguf(tmp_path / "tiny.gguf", **{**MODEL, **SHAPES[shape]})
    types = {"type_k": KV_TYPES[kv_type], "type_v": KV_TYPES[kv_type]}
    settings: dict[str, Any] = {"hh": 100, "recent": 100, "logits_all": True, **types}
    tokens = rng.integers(0, 384, 130).tolist()
    exact, rounded = (
        tiny_llama(model, attention=attention, **settings) for attention in ("avx512", "avx512bf16")
    )
    for llm in (exact, rounded):
        for token in tokens[:3]:
            llm.eval([token])
    is_few = SHAPES[shape]["n_head"] <= 16 * SHAPES[shape]["n_head_kv"]
    assert (rounded.scores[:3] == exact.scores[:3]).all() == is_few
    for llm in (exact, rounded):
        llm.eval(tokens[3:])
    assert (rounded.scores[3:130] != exact.scores[3:130]).any()
    np.testing.assert_allclose(rounded.scores[:130], exact.scores[:130], atol=BF16, rtol=0)
    scores = [llm.kv_rows(llm.text.n_layer - 1)[1] for llm in (rounded, exact)]
    np.testing.assert_allclose(*scores, atol=BF16, rtol=BF16)


def test_unsupported_parameters_are_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(SettingsError, match="give one of auto, ops, portable"):
        tiny_llama(path, attention="fast")
    for settings in ({"flash_attn": False}, {"type_k": 6, "type_v": 6}):  # 6: q5_0
        with pytest.raises(SettingsError, match=r"does not fit .* use auto"):
            tiny_llama(path, hh=8, recent=8, attention="portable", **settings)
        tiny_llama(path, hh=8, recent=8, **settings).eval([1, 2, 3])
