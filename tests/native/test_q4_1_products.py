"""Products with Q4_1 weights: every kernel of this machine against NumPy."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from compiled import compile_library, pointer, sizes_of
from pyh2o import Llama
from pyh2o.library import LIBRARY_FOLDER
from tiny_llama import tiny_llama

FloatArray = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

KERNELS = ("avx2", "avx512vnni")
Q4_1 = GGMLQuantizationType.Q4_1

# for sums of several thousand float products, relative to the root of their squares
ROUNDING = 1e-5
# Logits have standard deviation 1: different sums give the next layer different 8-bit inputs.
OTHER_ORDER = 0.2
MODEL: dict[str, Any] = {"seed": 6, "dtype": Q4_1}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    parts = Path(__file__).parent / "parts"
    return compile_library(
        "products", [parts / "products.cpp"], [], LIBRARY_FOLDER.glob("libllama.*")
    )


@pytest.fixture(params=KERNELS)
def kernel(library: ctypes.CDLL, request: pytest.FixtureRequest) -> bytes:
    name: bytes = request.param.encode()
    if not library.lanes_of(name):
        pytest.skip("not on this machine")
    return name


def rounded_inputs(rng: np.random.Generator, n_tokens: int, n_in: int) -> tuple[Bytes, FloatArray]:
    """Return inputs in ggml's Q8_1: bytes [n_tokens, n_blocks, 36], and as floats."""
    inputs = rng.standard_normal((n_tokens, n_in // 32, 32), dtype=np.float32)
    d = (np.abs(inputs).max(axis=2, keepdims=True) / 127).astype(np.float16)
    qs = np.clip(np.rint(inputs / d.astype(np.float32)), -127, 127).astype(np.int8)
    s = (qs.astype(np.float32).sum(axis=2, keepdims=True) * d.astype(np.float32)).astype(np.float16)
    blocks = np.concatenate([each.view(np.uint8) for each in (d, s, qs)], axis=2)
    return blocks, (qs * d.astype(np.float32)).reshape(n_tokens, n_in)


def multiplied(
    library: ctypes.CDLL,
    kernel: bytes,
    weights: Bytes,
    inputs: Bytes,
    panels: tuple[int, int] | None = None,
) -> FloatArray:
    n_tokens, n_blocks, _ = inputs.shape
    n_rows = len(weights)
    out = np.full((n_tokens, n_rows), np.nan, dtype=np.float32)
    begin, end = panels or (0, n_rows // library.lanes_of(kernel))
    sizes = sizes_of(n_blocks, n_rows, n_tokens, begin, end)
    inputs = np.ascontiguousarray(inputs)
    library.multiply(kernel, sizes, pointer(weights), pointer(inputs), pointer(out))
    return out


@pytest.mark.parametrize("n_tokens", [1, 3, 8, 29])
@pytest.mark.parametrize("n_in", [32, 576, 32 * 131])  # more blocks than are unpacked at once
def test_products_match_numpy(
    library: ctypes.CDLL, kernel: bytes, rng: np.random.Generator, n_in: int, n_tokens: int
) -> None:
    weights = quantize(rng.standard_normal((48, n_in), dtype=np.float32), Q4_1)
    inputs, exact = rounded_inputs(rng, n_tokens, n_in)
    # The sums of a block's inputs are rounded to f16 for the smallest weight.
    got = multiplied(library, kernel, weights, inputs)
    rows = dequantize(weights, Q4_1)
    blocks = weights.reshape(48, -1, 20)
    least = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64)
    sums = inputs[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64)
    steps = rows.reshape(48, -1, 32) - least[..., None].astype(np.float32)
    expected = exact.astype(np.float64) @ steps.reshape(48, n_in).T + sums @ least.T
    error = np.abs(got - expected).max() / np.sqrt(np.mean(expected**2))
    assert error < ROUNDING


def test_products_of_the_largest_numbers_match_numpy(library: ctypes.CDLL, kernel: bytes) -> None:
    """A block's sum of products is at most 15 * 127 * 32."""
    weights = np.zeros((16, 20), dtype=np.uint8)
    weights[:, :2] = np.array([1], dtype=np.float16).view(np.uint8)
    weights[:, 4:] = 0xFF
    inputs = np.zeros((2, 1, 36), dtype=np.uint8)
    inputs[..., :2] = np.array([1], dtype=np.float16).view(np.uint8)
    inputs[0, 0, 4:] = 127
    inputs[1, 0, 4:] = np.array([-127], dtype=np.int8).view(np.uint8)
    got = multiplied(library, kernel, weights, inputs)
    np.testing.assert_array_equal(got, [[15 * 127 * 32] * 16, [-15 * 127 * 32] * 16])


def test_a_token_gets_the_same_bits_in_any_batch_and_thread(
    library: ctypes.CDLL, kernel: bytes, rng: np.random.Generator
) -> None:
    n_in = 32 * 70
    weights = quantize(rng.standard_normal((64, n_in), dtype=np.float32), Q4_1)
    inputs, _ = rounded_inputs(rng, 15, n_in)
    together = multiplied(library, kernel, weights, inputs)
    for i in range(15):
        alone = multiplied(library, kernel, weights, inputs[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])
    lanes = library.lanes_of(kernel)
    n_panels = 64 // lanes
    for panel in range(n_panels):
        part = multiplied(library, kernel, weights, inputs, (panel, panel + 1))
        rows = slice(panel * lanes, (panel + 1) * lanes)
        np.testing.assert_array_equal(part[:, rows], together[:, rows])
        assert np.isnan(np.delete(part, np.r_[rows], axis=1)).all()


def logits(llm: Llama, tokens: list[int], size: int) -> npt.NDArray[Any]:
    for start in range(0, len(tokens), size):
        llm.eval(tokens[start : start + size])
    return llm.scores[: len(tokens)].copy()


def test_a_model_with_q4_1_weights_is_close_to_ggml(path: Path, rng: np.random.Generator) -> None:
    """Close to ggml's products, which `ops` uses, but not equal."""
    tokens = rng.integers(0, 384, 60).tolist()
    settings: dict[str, Any] = {"hh": 60, "recent": 60, "logits_all": True}
    expected = logits(tiny_llama(path, attention="ops", **settings), tokens, 60)
    at_once = logits(tiny_llama(path, **settings), tokens, 60)
    assert 0 < np.abs(at_once - expected).max() < OTHER_ORDER
