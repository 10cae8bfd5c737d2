"""How queries look at blocks of keys: every kernel that runs here against NumPy."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize

from compiled import compile_library, ggml_header, pointer, sizes_of
from pyh2o.library import LIBRARY_FOLDER
from random_cases import Cases
from row_types import TYPES

FloatArray = npt.NDArray[np.float32]

BLOCK = 16
KERNELS = ("portable", "neon", "avx2", "avx512")

# relative, of a sum of exponentials of float logits
EXP = 1e-6


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    parts = Path(__file__).parent / "parts"
    libraries = LIBRARY_FOLDER.glob("libllama.*")
    return compile_library("scan", [parts / "scan.cpp"], [ggml_header()], libraries)


@pytest.fixture(params=KERNELS)
def kernel(library: ctypes.CDLL, request: pytest.FixtureRequest) -> str:
    if not library.lanes_of(str(request.param).encode()):
        pytest.skip("not on this machine")
    return str(request.param)


def scan(
    library: ctypes.CDLL,
    kernel: str,
    queries: FloatArray,
    keys: npt.NDArray[Any],
    *,
    kv_type: str = "f32",
    scale: float = 1.0,
    cap: float = 0.0,
    first_row: npt.NDArray[np.uint32] | None = None,
    turn: FloatArray | None = None,
    neox: bool = False,
    mix: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """The maxima and the sums, [n_blocks, n_rows], of keys [n_keys] that may lie apart."""
    n_rows, n_embd = queries.shape
    n_keys = len(keys)
    # one row more than there are, which stays as it is
    max_, sum_ = np.full((2, -(-n_keys // BLOCK) + 1, n_rows), 7, dtype=np.float32)
    n_dims = 0 if turn is None else 2 * len(turn)
    library.scan(
        kernel.encode(),
        sizes_of(n_embd, n_rows, n_keys, n_dims, neox, 0 if mix is None else len(mix)),
        ctypes.c_int(int(TYPES[kv_type])),
        ctypes.c_float(scale),
        ctypes.c_float(cap),
        pointer(queries),
        pointer(keys),
        ctypes.c_size_t(keys.strides[0]),
        *map(pointer, (first_row, turn, mix, max_, sum_)),
    )
    assert (max_[-1] == 7).all()
    assert (sum_[-1] == 7).all()
    return max_[:-1], sum_[:-1]


def expected_of(
    logits: npt.NDArray[np.float64], first_row: npt.NDArray[np.uint32] | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The same of logits [n_rows, n_keys]."""
    n_rows, n_keys = logits.shape
    if first_row is not None:
        logits = np.where(np.arange(n_rows)[:, None] >= first_row, logits, -np.inf)
    n_blocks = -(-n_keys // BLOCK)
    padded = np.full((n_rows, n_blocks * BLOCK), -np.inf)
    padded[:, :n_keys] = logits
    blocks = padded.reshape(n_rows, n_blocks, BLOCK)
    peaks = blocks.max(axis=2)
    sums = np.exp(blocks - np.maximum(peaks, -1e30)[..., None]).sum(axis=2)
    return peaks.T, sums.T


def turned(keys: FloatArray, turn: FloatArray, neox: bool) -> npt.NDArray[np.float64]:
    """Keys [n, n_embd] with their pairs turned by [n_pairs, 2] factors."""
    n_pairs = len(turn)
    pairs = np.arange(n_pairs)
    re, im = (pairs, pairs + n_pairs) if neox else (2 * pairs, 2 * pairs + 1)
    res = keys.astype(np.float64)
    both = (res[:, re] + 1j * res[:, im]) * (turn[:, 0] + 1j * turn[:, 1])
    res[:, re], res[:, im] = both.real, both.imag
    return res


def test_all_shapes_and_types(library: ctypes.CDLL, kernel: str, cases: Cases) -> None:
    lanes = library.lanes_of(kernel.encode())
    for (kv_type, number), rng in cases([(name, n) for n in range(40) for name in TYPES]):
        least = 32 if kv_type.startswith("q") else lanes
        n_embd = least * int(rng.integers(1, 257 // least))
        n_rows = int(rng.choice([1, 2, 3, 7, 8, 9, 16, 48, 63, 64, 65, 130]))
        n_keys = int(rng.choice([1, 15, 16, 17, 32, 64, 100]))
        queries = rng.normal(size=(n_rows, n_embd)).astype(np.float32)
        rows = quantize(rng.normal(size=(n_keys, n_embd)).astype(np.float32), TYPES[kv_type])
        # as in a cache, where the rows of other heads lie between: numbers that would be seen
        keys = np.empty((n_keys, int(rng.integers(1, 4)), rows.shape[1]), dtype=rows.dtype)
        keys.view(np.uint8).fill(255)
        keys[:, -1] = rows
        options: dict[str, Any] = {"scale": n_embd**-0.5, "cap": [0.0, 1.5][number % 2]}
        if rng.integers(2):
            first_row = rng.integers(0, n_rows + 1, n_keys, dtype=np.uint32)
            first_row[rng.random(n_keys) < rng.random()] = n_rows
            first_row[rng.random(n_keys) < rng.random()] = 0
            options["first_row"] = first_row
        floats = dequantize(rows, TYPES[kv_type]).astype(np.float32)
        wanted = floats.astype(np.float64)
        if rng.integers(2):
            options["neox"] = bool(rng.integers(2))
            angles = rng.uniform(-9, 9, int(rng.integers(1, n_embd // 2 + 1)))
            options["turn"] = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
            wanted = turned(floats, options["turn"], options["neox"])
        logits = queries @ wanted.T * options["scale"]
        if options["cap"]:
            logits = options["cap"] * np.tanh(logits / options["cap"])
        found = scan(library, kernel, queries, keys[:, -1], kv_type=kv_type, **options)
        expected = expected_of(logits, options.get("first_row"))
        np.testing.assert_allclose(found[0], expected[0], atol=2e-5, rtol=0)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-6, rtol=5e-5)


@pytest.mark.parametrize("turns", [False, True])
def test_keys_that_are_mixed_after_they_were_turned(
    library: ctypes.CDLL, kernel: str, rng: np.random.Generator, turns: bool
) -> None:
    n_embd, n_mix, n_rows, n_keys = 96, 32, 70, 40
    # a reflection is its own inverse
    normal = rng.normal(size=n_mix)
    mix = np.eye(n_mix) - 2 * np.outer(normal, normal) / (normal @ normal)
    queries = rng.normal(size=(n_rows, n_embd)).astype(np.float32)
    keys = rng.normal(size=(n_keys, n_embd)).astype(np.float32)
    mixed = (keys.reshape(-1, n_mix) @ mix).reshape(keys.shape).astype(np.float32)
    angles = rng.uniform(-9, 9, 40)
    turn = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    found = scan(
        library,
        kernel,
        queries,
        mixed,
        scale=0.1,
        turn=turn if turns else None,
        mix=mix.astype(np.float32),
    )
    logits = queries @ (turned(keys, turn, False) if turns else keys.astype(np.float64)).T * 0.1
    for result, expected in zip(found, expected_of(logits), strict=True):
        np.testing.assert_allclose(result, expected, atol=2e-5, rtol=2e-5)


def of_logits(library: ctypes.CDLL, kernel: str, logits: FloatArray, **options: Any) -> Any:
    """The result for keys and a query that have these logits [n_keys] to the bit."""
    n_embd = library.lanes_of(kernel.encode())
    keys = np.zeros((len(logits), n_embd), dtype=np.float32)
    keys[:, 0] = logits
    query = np.zeros((1, n_embd), dtype=np.float32)
    query[0, 0] = 1
    return scan(library, kernel, query, keys, **options)


def test_sums_are_exact_to_float_rounding(
    library: ctypes.CDLL, kernel: str, rng: np.random.Generator
) -> None:
    logits = np.concatenate(
        [
            rng.normal(size=800),
            rng.normal(size=800) * 10,
            rng.normal(size=800) * 1e-3 + 30,
            rng.uniform(-100, 0, 800),
            rng.normal(size=800) * 1e4,
            np.repeat(rng.normal(size=50), BLOCK),
        ]
    ).astype(np.float32)
    found = of_logits(library, kernel, logits)
    expected = expected_of(logits.astype(np.float64)[None])
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=EXP, atol=0)


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_capped_logits(library: ctypes.CDLL, kernel: str, cap: float) -> None:
    logits = np.concatenate([np.linspace(-8, 8, 500) * cap, [0, 1e-6, -1e-6, 1e6, -1e6]])
    peaks, sums = of_logits(library, kernel, np.repeat(logits, BLOCK).astype(np.float32), cap=cap)
    np.testing.assert_allclose(peaks[:, 0], cap * np.tanh(logits / cap), atol=cap * 1e-6, rtol=0)
    np.testing.assert_array_equal(sums, BLOCK)


def test_blocks_without_keys_that_count(library: ctypes.CDLL, kernel: str) -> None:
    """Neither does a row without such a key see the others', however small its logits are."""
    logits = np.full(3 * BLOCK + 1, -1e5, dtype=np.float32)
    first_row = np.zeros(logits.size, dtype=np.uint32)
    first_row[BLOCK : 2 * BLOCK] = first_row[-1] = 1
    peaks, sums = of_logits(library, kernel, logits, first_row=first_row)
    np.testing.assert_array_equal(peaks[:, 0], np.float32([-1e5, -np.inf, -1e5, -np.inf]))
    np.testing.assert_array_equal(sums[:, 0], [BLOCK, 0, BLOCK, 0])


def test_keys_become_visible_row_by_row(library: ctypes.CDLL, kernel: str) -> None:
    n_embd = library.lanes_of(kernel.encode())
    n_rows = 70  # more than are looked at together
    keys = np.ones((n_rows, n_embd), dtype=np.float32)
    queries = np.zeros((n_rows, n_embd), dtype=np.float32)
    first_row = np.arange(n_rows, dtype=np.uint32)
    peaks, sums = scan(library, kernel, queries, keys, first_row=first_row)
    n_seen = np.clip(np.arange(1, n_rows + 1) - BLOCK * np.arange(len(sums))[:, None], 0, BLOCK)
    # the last block has fewer
    n_seen[-1] = np.minimum(n_seen[-1], n_rows % BLOCK)
    np.testing.assert_array_equal(sums, n_seen)
    np.testing.assert_array_equal(peaks, np.where(n_seen, 0, -np.inf))
