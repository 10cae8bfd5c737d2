"""The CUDA search kernels for archived rows against NumPy, compiled for the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize

from compiled import compile_library, ggml_header, pointer, sizes_of
from research.reference.codes import PageCodes, encode, hadamard
from research.reference.search import PASSAGE, best_rows, row_scores, search_groups
from row_types import TYPES

PAGE = 128
N_STREAM = 2
NO_FOCUS = 2**32 - 1
CLEAR = 1e-5  # smallest score difference that float32 resolves

FloatArray = npt.NDArray[np.float32]


class Head(ctypes.Structure):
    """llama_h2o_device_text::head"""

    _fields_ = (
        ("codes", ctypes.c_int32),
        ("n_alone", ctypes.c_uint32),
        ("n_together", ctypes.c_uint32),
        ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64),
    )


class Archived(ctypes.Structure):
    """See kernels.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_uint32)
            for name in (
                *("n_pages", "n_unrotated", "focus", "first_slot", "max_pages"),
                *("n_find", "n_query_mix", "n_dims", "type", "n_near"),
            )
        ),
        ("cap", ctypes.c_float),
        *((name, ctypes.c_uint64) for name in ("nb_row", "nb_page", "nb_codes")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("pages", "codes", "hidden", "factors", "heads"),
                *("shares", "gains", "interest", "weights"),
            )
        ),
    )


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    sources = Path(__file__).parent / "cuda_on_cpu"
    return compile_library("kernels", [sources / "kernels.cpp"], [sources, ggml_header()])


@dataclass(frozen=True)
class Case:
    """Sizes; n_alone and n_together as in llama_h2o_search_text, for the searching heads."""

    n_head: int
    n_head_kv: int
    n_tokens: int
    head_size: int
    kind: str = "f16"
    n_pages: int = 3
    n_alone: int = 20
    n_together: int = 50
    focus: int | None = None
    cap: float = 0.0
    mixed: bool = False
    sinks: bool = False
    looks: str = "first"
    n_near: int = 2  # pages in device memory

    @property
    def group(self) -> int:
        return self.n_head // self.n_head_kv

    def offset_of_codes(self, head: int) -> int:
        return -1 if self.looks == "none" or (self.looks == "first" and head > 0) else head


class Archive:
    """Random rows: in the device's layout and as arrays."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        self.case = case
        n_rows, kind = case.n_pages * PAGE, TYPES[case.kind]
        shape = (N_STREAM, case.n_pages, case.n_head_kv, PAGE, 2, case.head_size)
        self.rows = quantize(rng.normal(size=shape).astype(np.float32), kind)
        floats = dequantize(self.rows, kind).astype(np.float32)
        by_head = (N_STREAM, case.n_head_kv, n_rows, case.head_size)
        keys, self.values = (
            floats[:, :, :, :, i].transpose(0, 2, 1, 3, 4).reshape(by_head) for i in range(2)
        )
        self.n_unrotated = 1
        angles = rng.normal(size=(N_STREAM, case.n_pages - 1, case.head_size // 2))
        cos, sin = np.cos(angles), np.sin(angles)
        self.factors = np.stack(
            [np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)], axis=2
        ).astype(np.float32)
        self.keys = keys.copy()
        turned = keys[:, :, PAGE:].reshape(
            N_STREAM, case.n_head_kv, case.n_pages - 1, PAGE, case.head_size
        )
        swapped = np.roll(turned, case.head_size // 2, axis=-1)
        factors = self.factors[:, None, :, None]
        self.keys[:, :, PAGE:] = (
            turned * factors[..., 0, :] + swapped * factors[..., 1, :]
        ).reshape(N_STREAM, case.n_head_kv, -1, case.head_size)
        self.hidden = rng.random((N_STREAM, case.n_head_kv, n_rows)) < 0.7
        self.codes = [
            [
                [encode(of) for of in self.keys[s, h].reshape(case.n_pages, PAGE, -1)]
                for h in range(case.n_head_kv)
            ]
            for s in range(N_STREAM)
        ]

    def code_bytes(self, first_slot: int, max_pages: int) -> npt.NDArray[np.uint8]:
        """Return [N_STREAM, n_head_kv, max_pages, size]; slots without a page are nan."""
        size = len(page_bytes(self.codes[0][0][0]))
        shape = (N_STREAM, self.case.n_head_kv, max_pages, size)
        res = np.full(shape, 255, np.uint8)
        for s in range(N_STREAM):
            for h in range(self.case.n_head_kv):
                for i, codes in enumerate(self.codes[s][h]):
                    res[s, h, (first_slot + i) % max_pages] = page_bytes(codes)
        return res


def page_bytes(codes: PageCodes) -> npt.NDArray[np.uint8]:
    """Return a page in the layout of llama_h2o_code_layout."""
    bits = codes.positive.reshape(PAGE, -1, 4) @ (1 << np.arange(4))
    signs = (bits[: PAGE // 2] | bits[PAGE // 2 :] << 4).astype(np.uint8).T
    parts = (signs.ravel(), codes.scales.view(np.uint8), codes.centre.view(np.uint8))
    data = np.concatenate(parts)
    return np.pad(data, (0, -data.size % 64))


def estimated(codes: list[PageCodes], queries: FloatArray) -> npt.NDArray[np.float64]:
    """Return products [n_queries, n] of 8-bit queries [n_queries, head_size] and keys."""
    mixed = hadamard(queries)
    steps = np.abs(mixed).max(axis=1, keepdims=True) / 127
    whole = np.rint(mixed / steps)
    signs = np.concatenate([np.where(page.positive, 1, -1) for page in codes])
    scales = np.concatenate([page.scales for page in codes]).astype(np.float64)
    centres = np.repeat([page.centre for page in codes], PAGE, axis=0).astype(np.float64)
    res: npt.NDArray[np.float64] = queries @ centres.T + scales * steps * (whole @ signs.T)
    return res


def capped(logits: npt.NDArray[Any], cap: float) -> npt.NDArray[Any]:
    return cap * np.tanh(logits / cap) if cap else logits


def asking(case: Case, s: int, h: int, q: FloatArray) -> Iterator[tuple[slice, FloatArray]]:
    """Return queries [n, head_size] of a head that search together, and their tokens."""
    few = case.n_tokens * case.group <= 16
    groups = [np.arange(case.n_tokens)] if few else search_groups(case.n_tokens, case.group)
    for group in groups:
        tokens = slice(int(group[0]), int(group[-1]) + 1)
        yield tokens, q[s, tokens, h * case.group : (h + 1) * case.group].reshape(-1, q.shape[-1])


def retrieved_rows(
    case: Case, archive: Archive, s: int, h: int, queries: FloatArray, lse: FloatArray
) -> tuple[npt.NDArray[np.int64], float]:
    """Return the retrieved rows and the margin by which they were chosen."""
    hidden = np.flatnonzero(archive.hidden[s, h])
    focused = hidden // PASSAGE == (-1 if case.focus is None else case.focus // PASSAGE)
    rows, others = hidden[focused], hidden[~focused]
    if case.offset_of_codes(h) < 0:
        return rows, np.inf
    n_find = min(case.n_together, case.n_alone * (len(queries) // case.group))
    logits = estimated(archive.codes[s][h], queries)[:, others] / np.sqrt(case.head_size)
    best, margin = best_rows(row_scores(capped(logits, case.cap), lse), n_find)
    return np.append(rows, others[best]), margin


def clear_case(case: Case, rng: np.random.Generator) -> tuple[Archive, FloatArray, FloatArray]:
    """Return an archive, queries and their attention to cells that float32 decides clearly."""
    while True:
        archive = Archive(case, rng)
        shape = (N_STREAM, case.n_tokens, case.n_head, case.head_size)
        q = rng.normal(size=shape).astype(np.float32)
        lse = rng.normal(size=(N_STREAM, case.n_head, case.n_tokens)).astype(np.float32)
        margins = [
            retrieved_rows(case, archive, s, h, queries, lse_of(case, lse, s, h, tokens))[1]
            for s in range(N_STREAM)
            for h in range(case.n_head_kv)
            for tokens, queries in asking(case, s, h, q)
        ]
        if min(margins) > CLEAR:
            return archive, q, lse


def lse_of(case: Case, lse: FloatArray, s: int, h: int, tokens: slice) -> FloatArray:
    return lse[s, h * case.group : (h + 1) * case.group, tokens].T.ravel()


FEW = (
    Case(2, 2, 1, 64),
    Case(8, 2, 1, 128, "q8_0", focus=160),
    Case(12, 4, 4, 64, "q4_0", sinks=True, looks="all"),
    # rows that are not a whole number of 4-byte words
    Case(4, 2, 1, 96, "q8_0", focus=0, mixed=True),
    Case(4, 2, 1, 64, "f32", focus=352, looks="none"),
)
MANY = (
    Case(4, 4, 21, 128, "q8_0", n_near=0),
    Case(6, 2, 50, 64, n_together=300, looks="all"),
    Case(14, 2, 11, 96, "q8_0", cap=3.0, looks="all"),
    Case(4, 2, 70, 32, "f32", mixed=True, n_pages=18, n_alone=500, n_together=1200),
    Case(2, 2, 1, 64, focus=160),  # alongside cells that others attend to
    Case(2, 1, 5, 256, "q4_0", looks="all"),
)


@pytest.mark.parametrize("case", MANY, ids=str)
def test_search_retrieves_archived_rows(
    kernels: ctypes.CDLL, rng: np.random.Generator, case: Case
) -> None:
    archive, q, lse = clear_case(case, rng)
    out = np.full((N_STREAM, case.n_tokens, case.n_head, case.head_size + 1), np.nan, np.float32)
    sums = search(kernels, case, archive, q, lse=lse, out=out)
    expected, expected_sums, _ = expected_result(case, archive, q, lse)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for mine, theirs in zip(sums, expected_sums, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_queries_attend_to_cells_and_retrieved_rows_in_one_pass(
    kernels: ctypes.CDLL, rng: np.random.Generator, case: Case
) -> None:
    n_kv = 192
    archive, q, _ = clear_case(case, rng)
    k, v = rng.normal(size=(2, N_STREAM, n_kv, case.n_head_kv, case.head_size)).astype(np.float32)
    mask = np.where(rng.random((N_STREAM, case.n_tokens, n_kv)) < 0.3, -np.inf, 0)
    mask = mask.astype(np.float16)
    logits = np.einsum("sthe,skhe->shtk", q, np.repeat(k, case.group, axis=2))
    logits = logits / np.sqrt(case.head_size) + mask[:, None]
    sinks = rng.normal(3, 1, case.n_head).astype(np.float32) if case.sinks else None
    lse = np.logaddexp.reduce(logits, axis=-1)
    if sinks is not None:
        lse = np.logaddexp(lse, sinks[:, None])
    lse = lse.astype(np.float32)
    margins = [
        retrieved_rows(case, archive, s, h, queries, lse_of(case, lse, s, h, tokens))[1]
        for s in range(N_STREAM)
        for h in range(case.n_head_kv)
        for tokens, queries in asking(case, s, h, q)
    ]
    assert min(margins) > CLEAR / 10  # at most one of many samples is not
    scores = np.zeros((N_STREAM, case.n_head_kv, n_kv), np.float32)
    out = np.full((N_STREAM, case.n_tokens, case.n_head, case.head_size), np.nan, np.float32)
    sums = search(kernels, case, archive, q, cells=(k, v, mask, sinks, scores), out=out)

    found, expected_sums, kept = expected_result(case, archive, q, lse)
    probs = np.exp(logits - lse[..., None]) * kept[..., None]
    cells = np.einsum("shtk,skhe->sthe", probs, np.repeat(v, case.group, axis=2))
    np.testing.assert_allclose(out, cells + found[..., :-1], atol=2e-5)
    by_group = probs.reshape(N_STREAM, case.n_head_kv, case.group, case.n_tokens, n_kv)
    np.testing.assert_allclose(scores, by_group.mean(2).sum(2), atol=1e-5)
    for mine, theirs in zip(sums, expected_sums, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("from_kind", "to_kind", "head_size", "mixed", "n_tokens"),
    [
        ("f32", "f32", 64, True, 150),
        ("f16", "q8_0", 128, False, 3),
        ("q8_0", "q8_0", 96, True, 21),  # rows that are not a whole number of 4-byte words
        ("q4_0", "f16", 256, False, 9),
        ("f16", "q4_0", 64, False, 40),
    ],
)
def test_rows_are_written_to_the_archive(
    kernels: ctypes.CDLL,
    rng: np.random.Generator,
    from_kind: str,
    to_kind: str,
    head_size: int,
    mixed: bool,
    n_tokens: int,
) -> None:
    n_head_kv, n_cells, first, kind = 3, 200, 1275, TYPES[to_kind]
    n_pages = (first % PAGE + n_tokens) // PAGE + 1
    shape = (2, n_cells, n_head_kv, head_size)
    rows = quantize(rng.normal(size=shape).astype(np.float32), TYPES[from_kind])
    cells = rng.permutation(n_cells)[:n_tokens].astype(np.int32)
    turns = rng.integers(-1, 2, (n_head_kv, n_tokens)).astype(np.int32)
    angles = rng.normal(size=(2, head_size // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    pairs = (np.concatenate(two, -1) for two in ((cos, cos), (-sin, sin)))
    factors = np.stack([*pairs], axis=1).astype(np.float32)
    pages = quantize(np.zeros((n_pages, n_head_kv, PAGE, 2, head_size), np.float32), kind)
    kernels.archive(
        sizes_of(head_size, n_head_kv, head_size & -head_size if mixed else 0, n_tokens, first),
        *(ctypes.c_int(int(TYPES[from_kind])), ctypes.c_size_t(rows[0, 0, 0].nbytes)),
        *(ctypes.c_int(int(kind)), ctypes.c_size_t(pages[0, 0, 0, 0].nbytes)),
        *map(pointer, (*rows, factors, turns, cells, pages)),
    )

    x = dequantize(rows, TYPES[from_kind]).astype(np.float64)[:, cells].transpose(0, 2, 1, 3)
    k, v = hadamard(x[0]) if mixed else x[0], x[1]
    by = factors[turns].astype(np.float64)  # of the rotated ones
    turned = k * by[..., 0, :] + np.roll(k, head_size // 2, axis=-1) * by[..., 1, :]
    k = np.where(turns[..., None] >= 0, turned, k)
    expected = np.zeros((n_head_kv, n_pages * PAGE, 2, head_size))
    expected[:, first % PAGE : first % PAGE + n_tokens] = np.stack([k, v], axis=2)
    of_head = pages.transpose(1, 0, 2, 3, 4).reshape(n_head_kv, n_pages * PAGE, 2, -1)
    rounded = quantize(expected.astype(np.float32), kind)
    mine, theirs = (dequantize(a, kind) for a in (of_head, rounded))
    # numbers halfway between two values are rounded differently, one in thousands
    assert (mine != theirs).mean() < (0.6 if to_kind == "f32" else 0.002)
    steps = {"f32": 1e-6, "f16": 2e-3, "q8_0": 0.05, "q4_0": 0.8}
    np.testing.assert_allclose(mine, theirs, atol=steps[to_kind])


def expected_result(
    case: Case, archive: Archive, q: FloatArray, lse: FloatArray
) -> tuple[FloatArray, tuple[FloatArray, ...], FloatArray]:
    """Return the retrieved rows' part of the output, their sums of weights, and what remains."""
    n_rows = case.n_pages * PAGE
    out = np.zeros((N_STREAM, case.n_tokens, case.n_head, case.head_size + 1))
    kept = np.ones((N_STREAM, case.n_head, case.n_tokens))
    shares, gains = np.zeros(N_STREAM), np.zeros((N_STREAM, case.n_head_kv))
    weights, interest = np.zeros((N_STREAM, n_rows)), np.zeros((N_STREAM, n_rows // PASSAGE))
    for s in range(N_STREAM):
        for h in range(case.n_head_kv):
            for tokens, queries in asking(case, s, h, q):
                of = lse_of(case, lse, s, h, tokens)
                rows, _ = retrieved_rows(case, archive, s, h, queries, of)
                logits = queries.astype(np.float64) @ archive.keys[s, h, rows].T
                logits = capped(logits / np.sqrt(case.head_size), case.cap)
                total = np.logaddexp(of, np.logaddexp.reduce(logits, axis=1, initial=-np.inf))
                share = np.exp(logits - total[:, None])
                result = np.concatenate(
                    [share @ archive.values[s, h, rows], np.exp(of - total)[:, None]], axis=1
                ).reshape(-1, case.group, case.head_size + 1)
                heads = slice(h * case.group, (h + 1) * case.group)
                out[s, tokens, heads] = result
                kept[s, heads, tokens] = result[..., -1].T
                squares = (share**2).sum(axis=0)
                shares[s] += share.sum()
                gains[s, h] += squares.sum()
                weights[s, rows] += squares
                if case.offset_of_codes(h) >= 0:
                    np.add.at(interest[s], rows // PASSAGE, squares)
    return out, (shares, gains, interest, weights), kept


def search(
    kernels: ctypes.CDLL,
    case: Case,
    archive: Archive,
    q: FloatArray,
    *,
    out: FloatArray,
    lse: FloatArray | None = None,
    cells: tuple[npt.NDArray[Any] | None, ...] = (),
) -> tuple[npt.NDArray[np.float64], ...]:
    """Run the kernels. Return the sums of attended rows."""
    first_slot, max_pages = 2, case.n_pages + 1  # pages wrap around to the start of the ring
    codes = archive.code_bytes(first_slot, max_pages)
    row = archive.rows[0, 0, 0, 0, 0].nbytes
    hidden = np.packbits(archive.hidden, axis=-1, bitorder="little")
    heads = (Head * case.n_head_kv)(
        *(
            Head(
                *(case.offset_of_codes(h), case.n_alone, case.n_together),
                *(2 * h * PAGE * row + i * row for i in range(2)),
            )
            for h in range(case.n_head_kv)
        )
    )
    n_rows = case.n_pages * PAGE
    sums = [
        np.zeros((N_STREAM, n), np.uint64) for n in (1, case.n_head_kv, n_rows // PASSAGE, n_rows)
    ]
    head_mix = case.head_size & -case.head_size
    archived = Archived(
        *(case.n_pages, archive.n_unrotated, NO_FOCUS if case.focus is None else case.focus),
        *(first_slot, max_pages, case.n_together, head_mix if case.mixed else 0, case.head_size),
        *(int(TYPES[case.kind]), case.n_near, case.cap),
        *(2 * row, archive.rows[0, 0].nbytes, codes[0].nbytes),
        *(array.ctypes.data for array in (archive.rows, codes, hidden, archive.factors)),
        ctypes.addressof(heads),
        *(array.ctypes.data for array in sums),
    )
    asked = hadamard(q).astype(np.float32) if case.mixed else q
    k, v, mask, sinks, scores = cells or (None,) * 5
    if case.mixed and k is not None:
        k = hadamard(k).astype(np.float32)
    size = np.dtype(np.float32).itemsize * case.head_size
    n_kv = 0 if k is None else k.shape[1]
    sizes = (case.head_size, case.head_size, case.n_head, case.n_head_kv, n_kv, case.n_tokens)
    kernels.search(
        sizes_of(*sizes, N_STREAM),
        ctypes.byref(archived),
        ctypes.c_int(int(TYPES["f32"])),
        *(ctypes.c_size_t(size) for _ in range(2)),
        ctypes.c_float(case.head_size**-0.5),
        pointer(asked),
        *map(pointer, (k, v, mask, sinks, lse, scores)),
        pointer(out),
    )
    shares, gains, interest, weights = (array.astype(np.float64) / 2**32 for array in sums)
    return shares[:, 0], gains, interest, weights
