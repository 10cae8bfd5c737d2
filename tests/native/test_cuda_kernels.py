"""The CUDA kernels against NumPy on any machine, compiled for the CPU with cuda_on_cpu/."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from compiled import compile_library, ggml_header, pointer, sizes_of
from research.reference.codes import hadamard
from row_types import TYPES

HERE = Path(__file__).parent

FloatArray = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    sources = HERE / "cuda_on_cpu"
    headers = [sources, ggml_header()]
    return compile_library("kernels", [sources / "kernels.cpp"], headers)


# Sink logits: no sink, one without effect, and one that takes all attention.
SINKS = np.array([-np.inf, -1e4, 0, 3, 30, 1e30], np.float32)


def softmax(x: FloatArray, sinks: FloatArray | None = None) -> FloatArray:
    """Return the softmax over the last axis with a sink per head of axis -3; 0 if all is masked."""
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*x.shape[:-1], 1))
        return softmax(np.concatenate([x, column], axis=-1))[..., :-1]
    peak = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(peak), peak, 0))
    total = e.sum(axis=-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


HEADS = [(2, 2, 1), (6, 2, 1), (4, 2, 3), (5, 1, 3), (16, 1, 1)]
SIZES = [(64, 256), (128, 320), (32, 64), (96, 192)]
# Warps that read different numbers of 32-cell tiles.
LARGER_CACHES = [
    (8, 8, 1, 32, 1088, "f16"),
    (32, 32, 1, 32, 1600, "q8_0"),
    (64, 64, 1, 32, 1600, "f16"),
]


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "n_tokens", "head_size", "n_kv", "kv_type"),
    [
        (*heads, *sizes, list(TYPES)[(i + j) % len(TYPES)])  # every combination with both others
        for i, heads in enumerate(HEADS)
        for j, sizes in enumerate(SIZES)
    ]
    + LARGER_CACHES,
)
def test_attention_of_few_queries_matches_numpy(
    kernels: ctypes.CDLL,
    rng: np.random.Generator,
    n_head: int,
    n_head_kv: int,
    n_tokens: int,
    head_size: int,
    n_kv: int,
    kv_type: str,
) -> None:
    n_stream, n_group, kind = 2, n_head // n_head_kv, TYPES[kv_type]
    q = rng.normal(size=(n_stream, n_tokens, n_head, head_size)).astype(np.float32)
    k, v = (
        quantize(rng.normal(size=(n_stream, n_kv, n_head_kv, head_size)).astype(np.float32), kind)
        for _ in range(2)
    )
    hidden = rng.random((n_stream, n_tokens, n_kv)) < 0.3
    hidden[0, :, : min(128, n_kv // 2)] = True  # warps and a part without a visible cell
    mask = np.where(hidden, -np.inf, 0).astype(np.float16)
    sinks = rng.choice(SINKS, n_head)
    credit = rng.random((n_stream, n_tokens, n_kv)).astype(np.float32)
    before = rng.random((2, n_stream, n_head_kv, n_kv)).astype(np.float32)
    scores, squares = before.copy()
    out = np.zeros((n_stream, n_tokens, n_head, head_size), np.float32)
    scale = head_size**-0.5

    kernels.attend(
        sizes_of(head_size, head_size, n_head, n_head_kv, n_kv, n_tokens, n_stream),
        ctypes.c_int(int(kind)),
        ctypes.c_size_t(k[0, 0, 0].nbytes),
        ctypes.c_size_t(v[0, 0, 0].nbytes),
        ctypes.c_float(scale),
        *map(pointer, (q, k, v, mask, sinks, credit, scores, squares, out)),
    )

    keys, values = (
        np.repeat(dequantize(rows, kind).astype(np.float32), n_group, axis=2) for rows in (k, v)
    )
    logits = np.einsum("sthe,skhe->shtk", q, keys) * np.float32(scale)
    probs = softmax(logits + mask[:, None].astype(np.float32), sinks)
    expected = np.einsum("shtk,skhe->sthe", probs, values)
    by_group = probs.reshape(n_stream, n_head_kv, n_group, n_tokens, n_kv)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(
        scores, before[0] + (by_group * credit[:, None, None]).mean(2).sum(2), atol=1e-5
    )
    np.testing.assert_allclose(squares, before[1] + (by_group**2).mean(2).sum(2), atol=1e-5)


def attend_f32(
    kernels: ctypes.CDLL,
    sizes: Any,
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    mask: npt.NDArray[np.float16],
    scores: FloatArray | None,
    out: FloatArray,
) -> None:
    """Attention over rows of 64 elements without scale, sinks, scores and squares."""
    kernels.attend(
        sizes,
        ctypes.c_int(int(TYPES["f32"])),
        ctypes.c_size_t(k[0, 0, 0].nbytes),
        ctypes.c_size_t(v[0, 0, 0].nbytes),
        ctypes.c_float(1.0),
        *map(pointer, (q, k, v, mask, None, None, scores, None, out)),
    )


def test_attention_does_not_depend_on_block_and_thread_order(
    kernels: ctypes.CDLL, rng: np.random.Generator
) -> None:
    """Bit for bit. The number of parts, smaller for many texts at once, changes rounding."""
    n_stream, n_head, n_head_kv, n_kv = 24, 8, 4, 320
    q = rng.normal(size=(n_stream, 1, n_head, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, n_stream, n_kv, n_head_kv, 64)).astype(np.float32)
    mask = np.where(rng.random((n_stream, 1, n_kv)) < 0.3, -np.inf, 0).astype(np.float16)

    def attend(streams: slice, *, backwards: bool = False) -> tuple[FloatArray, FloatArray]:
        some = [np.ascontiguousarray(x[streams]) for x in (q, k, v, mask)]
        scores = np.zeros((len(some[0]), n_head_kv, n_kv), np.float32)
        out = np.zeros((len(some[0]), 1, n_head, 64), np.float32)
        sizes = sizes_of(64, 64, n_head, n_head_kv, n_kv, 1, len(some[0]))
        kernels.run_backwards(ctypes.c_bool(backwards))
        attend_f32(kernels, sizes, *some, scores, out)
        kernels.run_backwards(ctypes.c_bool(False))
        return out, scores

    together = attend(slice(None))
    np.testing.assert_equal(attend(slice(None), backwards=True), together)
    alone = attend(slice(1))
    np.testing.assert_equal(attend(slice(1), backwards=True), alone)
    for one, of_all in zip(alone, together, strict=True):
        np.testing.assert_allclose(one, of_all[:1], rtol=0, atol=1e-6)


def test_attention_without_scores_matches_numpy(
    kernels: ctypes.CDLL, rng: np.random.Generator
) -> None:
    q = rng.normal(size=(1, 1, 2, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 64, 1, 64)).astype(np.float32)
    mask, out = np.zeros((1, 1, 64), np.float16), np.zeros((1, 1, 2, 64), np.float32)
    attend_f32(kernels, sizes_of(64, 64, 2, 1, 64, 1, 1), q, k, v, mask, None, out)
    probs = softmax(np.einsum("sthe,skge->shtk", q, k))
    np.testing.assert_allclose(out, np.einsum("shtk,skge->sthe", probs, v), atol=1e-5)


@pytest.mark.parametrize("n_infinite", [1, 256])  # two parts consist of these
def test_attention_over_nan_rows_is_nan(
    kernels: ctypes.CDLL, rng: np.random.Generator, n_infinite: int
) -> None:
    """Masked nan rows, in the first stream, change nothing."""
    q = rng.normal(size=(2, 1, 1, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 320, 1, 64)).astype(np.float32)
    k[:, :n_infinite] = np.resize([np.inf, -np.inf], 64)
    mask, out = np.zeros((2, 1, 320), np.float16), np.zeros((2, 1, 1, 64), np.float32)
    mask[0, :, :n_infinite] = -np.inf
    scores = np.zeros((2, 1, 320), np.float32)
    attend_f32(kernels, sizes_of(64, 64, 1, 1, 320, 1, 2), q, k, v, mask, scores, out)
    probs = softmax(q[0, :, 0] @ k[0, n_infinite:, 0].T)
    np.testing.assert_allclose(out[0, :, 0], probs @ v[0, n_infinite:, 0], atol=1e-5)
    np.testing.assert_allclose(scores[0, :, n_infinite:], probs, atol=1e-5)
    assert not scores[0, :, :n_infinite].any()
    assert np.isnan(out[1]).all()
    assert np.isnan(scores[1]).any()


@pytest.mark.parametrize("has_credit", [False, True])
def test_sum_of_probabilities_matches_numpy(
    kernels: ctypes.CDLL, rng: np.random.Generator, has_credit: bool
) -> None:
    n_stream, n_head, n_head_kv, n_tokens, n_kv = 2, 6, 2, 5, 192
    probs = rng.random((n_stream, n_head, n_tokens, n_kv)).astype(np.float32)
    credit = rng.random((n_stream, n_tokens, n_kv)).astype(np.float32) if has_credit else None
    before = rng.random((n_stream, n_head_kv, n_kv)).astype(np.float32)
    sums = before.copy()
    kernels.add(
        sizes_of(n_kv, n_tokens, n_head, n_head_kv, n_stream),
        *map(pointer, (probs, credit, sums)),
    )
    weighted = probs if credit is None else probs * credit[:, None]
    expected = weighted.reshape(n_stream, n_head_kv, -1, n_tokens, n_kv).mean(2).sum(2)
    np.testing.assert_allclose(sums, before + expected, atol=1e-5)


PROMPTS = [
    (6, 2, 1, 64, 64, "f16"),
    (8, 2, 17, 128, 320, "q8_0"),
    (2, 2, 64, 32, 192, "q4_0"),
    (7, 1, 33, 256, 128, "f32"),
    (64, 64, 20, 16, 320, "f16"),  # two parts, of three tiles and of two
    (7, 1, 5, 80, 256, "f16"),
    (2, 1, 200, 64, 128, "q8_0"),
    (4, 1, 51, 256, 64, "q4_0"),
]


def prompt(
    rng: np.random.Generator,
    sizes: tuple[int, int, int, int, int],
    kind: GGMLQuantizationType,
) -> dict[str, Any]:
    """Return the inputs of the prompt kernels for two streams."""
    n_head, n_head_kv, n_tokens, head_size, n_kv = sizes
    hidden = rng.random((2, n_tokens, n_kv)) < 0.3
    hidden[0, :, : n_kv // 2] = True  # parts and a tile without a visible cell
    some = rng.normal(size=hidden.shape)
    return {
        "q": rng.normal(size=(2, n_tokens, n_head, head_size)).astype(np.float16),
        "k": quantize(rng.normal(size=(2, n_kv, n_head_kv, head_size)).astype(np.float32), kind),
        "mask": np.where(hidden, -np.inf, some).astype(np.float16),
        "sinks": rng.choice(SINKS, n_head),
        "credit": rng.random(hidden.shape).astype(np.float32),
        "kept": rng.random((2, n_tokens, n_head)).astype(np.float32),
    }


def sum_columns(
    kernels: ctypes.CDLL,
    given: dict[str, Any],
    kind: GGMLQuantizationType,
    scale: float,
    scores: FloatArray | None,
    squares: FloatArray | None,
) -> FloatArray:
    """Run the kernel. Return the logarithms of sums, [n_stream, n_head, n_tokens]."""
    n_stream, n_tokens, n_head, head_size = given["q"].shape
    n_kv, n_head_kv = given["k"].shape[1:3]
    lse = np.full((n_stream, n_head, n_tokens), np.nan, np.float32)
    kernels.columns(
        sizes_of(head_size, head_size, n_head, n_head_kv, n_kv, n_tokens, n_stream),
        ctypes.c_int(int(kind)),
        ctypes.c_size_t(given["k"][0, 0, 0].nbytes),
        ctypes.c_float(scale),
        *(pointer(given.get(name)) for name in ("q", "k", "mask", "sinks", "credit", "kept")),
        *map(pointer, (scores, squares, lse)),
    )
    return lse


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "n_tokens", "head_size", "n_kv", "kv_type"), PROMPTS
)
def test_prompt_scores_match_numpy(
    kernels: ctypes.CDLL,
    rng: np.random.Generator,
    n_head: int,
    n_head_kv: int,
    n_tokens: int,
    head_size: int,
    n_kv: int,
    kv_type: str,
) -> None:
    kind, scale = TYPES[kv_type], head_size**-0.5
    given = prompt(rng, (n_head, n_head_kv, n_tokens, head_size, n_kv), kind)
    before = rng.random((2, 2, n_head_kv, n_kv)).astype(np.float32)
    scores, squares = before.copy()
    found = sum_columns(kernels, given, kind, scale, scores, squares)

    # tensor cores multiply f16
    keys = dequantize(given["k"], kind).astype(np.float16).astype(np.float64)
    keys = np.repeat(keys, n_head // n_head_kv, axis=2)
    logits = np.einsum("sthe,skhe->shtk", given["q"].astype(np.float64), keys) * scale
    logits += given["mask"][:, None]
    lse = np.logaddexp(np.log(np.exp(logits).sum(-1)), given["sinks"][:, None].astype(np.float64))
    probs = np.exp(logits - lse[..., None]) * given["kept"].transpose(0, 2, 1)[..., None]
    by_group = probs.reshape(2, n_head_kv, -1, n_tokens, n_kv)
    expected = (by_group * given["credit"][:, None, None]).mean(2).sum(2)
    np.testing.assert_allclose(found, lse, rtol=0, atol=3e-6)
    np.testing.assert_allclose(scores - before[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(squares - before[1], (by_group**2).mean(2).sum(2), 1e-5, 1e-6)


def test_prompt_scores_do_not_depend_on_block_and_thread_order(
    kernels: ctypes.CDLL, rng: np.random.Generator
) -> None:
    """Bit for bit, and not on which other outputs are requested."""
    kind = TYPES["q8_0"]
    given = prompt(rng, (6, 3, 50, 64, 192), kind)
    del given["sinks"], given["credit"], given["kept"]
    ways = []
    for backwards, has_squares in ((False, True), (True, True), (False, False)):
        scores, squares = np.zeros((2, 2, 3, 192), np.float32)
        kernels.run_backwards(ctypes.c_bool(backwards))
        lse = sum_columns(kernels, given, kind, 0.125, scores, squares if has_squares else None)
        kernels.run_backwards(ctypes.c_bool(False))
        ways.append((lse, scores))
        np.testing.assert_allclose(scores.sum(-1), 50, rtol=1e-6)  # as many as queries
    np.testing.assert_equal(ways[1], ways[0])
    np.testing.assert_equal(ways[2], ways[0])


def test_prompts_over_nan_rows_score_nan(kernels: ctypes.CDLL, rng: np.random.Generator) -> None:
    """Masked nan rows, in the first stream, change nothing; its first query sees no row."""
    kind, shape = TYPES["f32"], (2, 2, 20, 32, 128)
    given = prompt(rng, shape, kind)
    del given["sinks"]
    given["k"][:, 100:, :, :] = np.resize([np.inf, -np.inf], 32)
    given["mask"][0, :, 100:] = -np.inf
    given["mask"][1] = 0
    sane = {**given, "k": np.where(np.isfinite(given["k"]), given["k"], 0)}
    for one in (given, sane):
        one["mask"] = one["mask"].copy()
        one["mask"][0, 0] = -np.inf
    (scores, squares), (expected, _) = np.zeros((2, 2, 2, 2, 128), np.float32)
    lse = sum_columns(kernels, given, kind, 0.2, scores, squares)
    of_sane = sum_columns(kernels, sane, kind, 0.2, expected, None)
    np.testing.assert_equal(scores[0], expected[0])
    np.testing.assert_equal(lse[0], of_sane[0])
    assert np.isneginf(lse[0, :, 0]).all()
    assert np.isfinite(lse[0, :, 1:]).all()
    assert np.isfinite(scores[0]).all()
    assert not scores[0, :, 100:].any()
    assert np.isnan(lse[1]).all()
    assert np.isnan(scores[1]).any()


SAFE, UNUSED = -1, -2  # instead of positions


def chosen(
    kernels: ctypes.CDLL,
    sums: FloatArray,
    positions: npt.NDArray[np.int32],
    divisors: npt.NDArray[np.float64],
    end: int,
    n_keep: int,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether each row is kept, [n_heads, n_cells], and whether a head's sums are nan."""
    n_heads, n_cells = sums.shape
    n_words = -(-n_cells // 32)
    pos = np.append(positions.ravel(), [n_keep, end]).astype(np.int32)
    bits = np.full((n_heads, n_words + 1), 0xFFFFFFFF, np.uint32)
    sizes = sizes_of(n_cells, n_heads, len(divisors))
    kernels.choose(sizes, *map(pointer, (sums, divisors, pos, bits)))
    stays = np.unpackbits(bits[:, :-1].copy().view(np.uint8), axis=1, bitorder="little")
    return stays[:, :n_cells].astype(bool), bits[:, -1].astype(bool)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("n_cells", [1, 31, 320, 1500])
@pytest.mark.parametrize("kind", ["sum", "by age", "few values", "near", "equal"])
def test_kernel_keeps_the_rows_with_the_highest_scores(
    kernels: ctypes.CDLL, rng: np.random.Generator, kind: str, n_cells: int, backwards: bool
) -> None:
    """Scores are quotients in 64 bits; of equal rows the newer is kept."""
    n_heads, end = 5, 3 * n_cells
    positions = np.stack([rng.permutation(end)[:n_cells] for _ in range(n_heads)]).astype(np.int32)
    positions[rng.random(positions.shape) < 0.2] = SAFE
    positions[rng.random(positions.shape) < 0.1] = UNUSED
    sums: FloatArray = rng.exponential(size=positions.shape).astype(np.float32)
    divisors = np.ones(1)
    if kind == "by age":  # the last span covers all older rows
        divisors = rng.random(2 * n_cells + 1) + 0.5
        sums *= np.float32(1e-42)  # partly denormal
    elif kind == "few values":
        sums = rng.integers(-1, 3, sums.shape).astype(np.float32)
        sums[sums == 0] *= rng.choice([-1, 1], sums[sums == 0].shape)  # zero has two signs
    elif kind == "near":  # equal as floats
        sums[:] = 1
        divisors = np.nextafter(1.5, 2) + np.arange(end + 1) * 2.0**-52
    elif kind == "equal":
        sums[:] = 0.25

    kernels.run_backwards(ctypes.c_bool(backwards))
    for n_keep in {0, n_cells // 3, n_cells // 2, n_cells}:
        stays, refused = chosen(kernels, sums, positions, divisors, end, n_keep)
        assert not refused.any()
        for mine, pos, x in zip(stays, positions, sums, strict=True):
            rows = np.flatnonzero(pos >= 0)
            scores = x[rows] / divisors[np.minimum(end - pos[rows], len(divisors) - 1)]
            best = rows[np.lexsort((pos[rows], scores))[::-1]]
            safe = np.flatnonzero(pos == SAFE)
            expected = [*safe, *best[: max(0, n_keep - len(safe))]]
            np.testing.assert_array_equal(np.flatnonzero(mine), np.sort(expected))
    kernels.run_backwards(ctypes.c_bool(False))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nan_sums_are_refused(kernels: ctypes.CDLL, value: float) -> None:
    """Also those of rows that are kept anyway, but not of cells without a row."""
    positions = np.tile(np.arange(40, dtype=np.int32), (4, 1))
    positions[:, 35:] = SAFE
    positions[:, 20] = UNUSED
    sums = np.ones((4, 40), np.float32)
    sums[1, 3] = sums[2, 39] = sums[3, 20] = value
    _, refused = chosen(kernels, sums, positions, np.ones(1), 40, 10)
    np.testing.assert_array_equal(refused, [False, True, True, False])


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("n_embd", "n_dims", "first"), [(64, 64, 0), (80, 32, 0), (40, 24, 16)])
def test_keys_are_rotated(
    kernels: ctypes.CDLL,
    rng: np.random.Generator,
    n_embd: int,
    n_dims: int,
    first: int,
    neox: bool,
) -> None:
    """In 32 bits, with one rounding; other rows and elements stay unchanged."""
    keys = rng.normal(size=(50, n_embd)).astype(np.float16)
    keys[0] *= 1e-6  # denormal in 16 bits
    angles = rng.uniform(-3, 3, (4, n_dims // 2))
    pairs = np.arange(n_dims).reshape((2, -1) if neox else (-1, 2))
    low, high = pairs if neox else pairs.T
    factors = np.empty((4, 2, n_dims), np.float32)
    factors[:, 0, low] = factors[:, 0, high] = np.cos(angles)
    factors[:, 1, low], factors[:, 1, high] = -np.sin(angles), np.sin(angles)
    rows = rng.permutation(50)[:30].astype(np.int32)
    turns = rng.integers(0, 4, 30).astype(np.int32)

    expected = keys.copy()
    x = keys[rows, first : first + n_dims].astype(np.float32)
    other = np.empty_like(x)
    other[:, low], other[:, high] = x[:, high], x[:, low]
    products = (x * factors[turns, 0]).astype(np.float64)
    sums = products + other.astype(np.float64) * factors[turns, 1]
    expected[rows, first : first + n_dims] = sums.astype(np.float32).astype(np.float16)

    rotate(kernels, (n_embd, n_dims, first, int(neox), 30, 0), "f16", keys, factors, rows, turns)
    np.testing.assert_array_equal(keys, expected)


@pytest.mark.parametrize(("kv_type", "n_embd"), [("q8_0", 96), ("q4_0", 64)])
def test_quantised_keys_are_mixed_when_they_are_rotated(
    kernels: ctypes.CDLL, rng: np.random.Generator, kv_type: str, n_embd: int
) -> None:
    kind, n_mix = TYPES[kv_type], n_embd & -n_embd
    keys = quantize(rng.normal(size=(50, n_embd)).astype(np.float32), kind)
    angles = rng.uniform(-3, 3, (4, n_embd // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    pairs = (np.concatenate(two, -1) for two in ((cos, cos), (-sin, sin)))
    factors = np.stack([*pairs], axis=1).astype(np.float32)
    rows = rng.permutation(50)[:30].astype(np.int32)
    turns = rng.integers(0, 4, 30).astype(np.int32)

    x = hadamard(dequantize(keys, kind))
    x[rows] = x[rows] * factors[turns, 0] + np.roll(x[rows], n_embd // 2, -1) * factors[turns, 1]
    expected = dequantize(quantize(hadamard(x).astype(np.float32), kind), kind)
    others = np.delete(np.arange(50), rows)
    before = keys[others].copy()
    rotate(kernels, (n_embd, n_embd, 0, 1, 30, n_mix), kv_type, keys, factors, rows, turns)
    np.testing.assert_array_equal(keys[others], before)
    mine = dequantize(keys, kind)[rows]
    # numbers halfway between two values are rounded differently
    assert (mine != expected[rows]).mean() < 0.002
    np.testing.assert_allclose(mine, expected[rows], atol={"q8_0": 0.05, "q4_0": 0.8}[kv_type])


def rotate(
    kernels: ctypes.CDLL, sizes: tuple[int, ...], kv_type: str, *arrays: npt.NDArray[Any]
) -> None:
    """Run the kernel with sizes as in kernels.cpp, keys, factors, rows and rotations."""
    size = ctypes.c_size_t(arrays[0][0].nbytes)
    kernels.rotate(sizes_of(*sizes), ctypes.c_int(int(TYPES[kv_type])), size, *map(pointer, arrays))
