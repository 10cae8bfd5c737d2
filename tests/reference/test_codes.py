"""Codes of archived keys and retrieval by them, on random numbers without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from random_cases import Cases
from research.reference import N_PAGE, PageCodes, as_float16, encode, estimates, search_groups
from research.reference.archive import LayerArchive
from research.reference.codes import LARGEST, hadamard
from research.reference.search import best_rows, row_scores

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]


def rotated(x: FloatArray, positions: IntArray) -> FloatArray:
    """Rotate pairs as complex numbers, every pair by 0.3 radians per position."""
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(0.3j * positions)[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


def signed_products(keys: FloatArray, queries: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return products [n_queries, n] from signs and scale, and the largest error of the tables."""
    centre = as_float16(keys.mean(axis=0)).astype(np.float64)
    differences, asking = hadamard(keys - centre), hadamard(queries)
    signs = np.where(differences >= 0, 1, -1)
    scales = (differences**2).sum(axis=1) / np.abs(differences).sum(axis=1)
    step = np.abs(asking).reshape(len(asking), -1, 4).sum(axis=2).max(axis=1) * 2 / LARGEST
    n_groups = keys.shape[1] // 4
    products = scales * (asking @ signs.T)
    tables_off = n_groups * step[:, None] / 2 * scales
    return (queries @ centre)[:, None] + products, tables_off + 1e-3 * np.abs(products)


@pytest.mark.parametrize("size", [4, 16, 64, 80, 96, 128])
def test_the_hadamard_transform_is_its_own_inverse(rng: np.random.Generator, size: int) -> None:
    """Each of its blocks spreads one element evenly."""
    x = rng.standard_normal((3, size))
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=1e-12)
    block = {80: 16, 96: 32}.get(size, size)
    spread = np.zeros(size)
    spread[:block] = 1 / np.sqrt(block)
    np.testing.assert_allclose(np.abs(hadamard(np.eye(size)[1])), spread, atol=1e-12)


def test_estimates_equal_signed_products_up_to_table_steps(cases: Cases) -> None:
    for size, rng in cases([8, 32, 64, 80, 128]):
        keys = rng.standard_normal((50, size)) * rng.uniform(0.1, 3) + rng.standard_normal(size)
        queries = 4 * rng.standard_normal((7, size))
        estimated = estimates([encode(keys)], queries)
        expected, off = signed_products(keys, queries)
        assert (np.abs(estimated - expected) <= off).all()
        # minus the centre's, in steps from the smallest: whole numbers
        codes, most = encode(keys), np.abs(hadamard(queries)).reshape(7, -1, 4).sum(axis=2)
        products = (estimated - (queries @ codes.centre)[:, None]) / codes.scales
        steps = (products + most.sum(axis=1)[:, None]) / (most.max(axis=1)[:, None] * 2 / LARGEST)
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-6)


def test_estimates_are_close_and_unbiased(rng: np.random.Generator) -> None:
    """Their error is below that of a random sign per element, and independent of the product."""
    size = 128
    keys = rng.standard_normal((N_PAGE, size)) + 2 * rng.standard_normal(size)
    differences = keys - keys.mean(axis=0)
    queries = rng.standard_normal((60, size)) + differences[:60] / 2
    exact, estimated = queries @ keys.T, estimates([encode(keys)], queries)
    of_differences = queries @ differences.T
    slope = ((estimated - exact) * of_differences).sum() / (of_differences**2).sum()
    assert abs(slope) < 0.05
    lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(differences, axis=1)
    errors = (estimated - exact) / lengths * np.sqrt(size)
    assert abs(errors.mean()) < 0.05
    # sqrt(pi / 2 - 1) for a Gaussian, a little less for queries that point to the keys
    assert 0.65 < errors.std() < 0.85


def test_the_estimate_is_exact_for_a_parallel_query(rng: np.random.Generator) -> None:
    """RaBitQ's scale makes it exact, except for float16 and the tables' steps."""
    keys = rng.standard_normal((40, 64)) + rng.standard_normal(64)
    queries = keys - keys.mean(axis=0)
    _, off = signed_products(keys, queries)
    wrong = np.abs(np.diag(estimates([encode(keys)], queries)) - (queries * keys).sum(axis=1))
    assert (wrong < np.diag(off) + 2e-3 * np.linalg.norm(queries, axis=1) * 8).all()


def test_equal_keys_and_zero_queries_have_estimates(rng: np.random.Generator) -> None:
    """Without a difference to the centre there is no scale; without a query there is no step."""
    key = as_float16(rng.standard_normal(32)).astype(np.float64)
    codes = encode(np.stack([key, key, key]))
    assert codes.scales.tolist() == [0, 0, 0]
    queries = np.stack([rng.standard_normal(32), np.zeros(32)])
    expected = (queries @ key)[:, None] + np.zeros(3)
    np.testing.assert_allclose(estimates([codes], queries), expected)


def test_pages_are_estimated_together(rng: np.random.Generator) -> None:
    pages = [encode(rng.standard_normal((n_rows, 16)) + n_rows) for n_rows in (128, 128, 3)]
    queries = rng.standard_normal((5, 16))
    of_each = np.concatenate([estimates([page], queries) for page in pages], axis=1)
    assert of_each.shape == (5, 259)
    np.testing.assert_allclose(estimates(pages, queries), of_each, atol=1e-12)


def assert_same_codes(codes: PageCodes, expected: PageCodes) -> None:
    assert codes.centre.dtype == codes.scales.dtype == np.float16
    np.testing.assert_array_equal(codes.centre, expected.centre)
    np.testing.assert_array_equal(codes.positive, expected.positive)
    np.testing.assert_array_equal(codes.scales, expected.scales)


def test_codes_do_not_depend_on_how_a_page_was_filled(rng: np.random.Generator) -> None:
    """In chunks or at once, at any shift, from keys in float16."""
    keys, values = rng.standard_normal((2, 2, 300, 16))
    archives = []
    for sizes, shift in (([300], 0), ([1, 126, 1, 1, 100, 71], 90)):
        archive = LayerArchive(2, 16, rounding=as_float16)
        first = 0
        for size in sizes:
            rows = slice(first, first + size)
            places = np.arange(first, first + size) - shift
            archive.append(rotated(keys[:, rows], places), values[:, rows], shift, rotated)
            archive.codes(0, shift, rotated)  # those of the last page are computed again
            first += size
        archives.append(archive)
        assert archive.n_positions == 300
        own = rotated(keys, np.arange(300) % 128)
        np.testing.assert_allclose(archive.keys, own, atol=5e-3)
        np.testing.assert_array_equal(archive.values, as_float16(values))
        for later, head in [(90, 0), (90, 1), (0, 0), (500, 1), (200, 0)]:
            codes = archive.codes(head, later, rotated)
            assert [page.positive.shape for page in codes] == [(128, 16), (128, 16), (44, 16)]
            for first, page in zip((0, 128, 256), codes, strict=True):
                kept = archive.keys[head, first : first + 128].astype(np.float64)
                places = np.full(len(kept), max(first - later, 0))
                assert_same_codes(page, encode(rotated(kept, places)))
    np.testing.assert_allclose(archives[0].keys, archives[1].keys, atol=2e-3)


def test_codes_change_if_a_page_moves(rng: np.random.Generator) -> None:
    archive = LayerArchive(1, 16)
    keys = rng.standard_normal((1, 300, 16))
    archive.append(keys, keys, 0, rotated)
    of_shifts = [archive.codes(0, shift, rotated) for shift in (0, 100, 150, 200)]
    for page, n_places in enumerate([1, 3, 4]):
        signs = {of_shift[page].positive.tobytes() for of_shift in of_shifts}
        assert len(signs) == n_places


def test_pages_never_move_before_the_start(rng: np.random.Generator) -> None:
    archive = LayerArchive(1, 8, rounding=lambda rows: rows)
    keys = rng.standard_normal((1, 400, 8))
    archive.append(rotated(keys, np.arange(400)), keys, 0, rotated)
    assert archive.places(0).tolist() == [0, 128, 256, 384]
    assert archive.places(200).tolist() == [0, 0, 56, 184]
    positions = np.array([5, 130, 255, 256, 399])
    places = np.array([5, 2, 127, 56, 199])
    np.testing.assert_allclose(
        archive.keys_at(0, positions, 200, rotated), rotated(keys[0, positions], places), atol=1e-12
    )


# ---- retrieval ----


@pytest.mark.parametrize(
    ("n_tokens", "group", "sizes"),
    [
        (1, 1, [1]),
        (64, 1, [64]),
        (130, 1, [64, 64, 2]),
        (5, 4, [5]),
        (35, 4, [16, 16, 3]),
        (11, 7, [9, 2]),
        (2, 64, [1, 1]),
        (3, 100, [1, 1, 1]),
    ],
)
def test_tokens_search_in_groups(n_tokens: int, group: int, sizes: list[int]) -> None:
    groups = search_groups(n_tokens, group)
    assert [together.size for together in groups] == sizes
    assert np.concatenate(groups).tolist() == list(range(n_tokens))


def test_a_row_is_scored_by_the_query_that_attends_to_it_most() -> None:
    """Relative to what the query attends to already, not by the logit alone."""
    resident = np.array([3.0, 1.0])
    logits = np.array([[0.0, 9, 2000, -2000], [0.0, 5, -2000, -2000]])
    assert row_scores(logits, resident).tolist() == [-1, 6, 1997, -2001]
    assert row_scores(logits[:, 1:2], np.array([3.0, -2.0])).tolist() == [7]


def test_the_lower_position_wins_among_equal_scores() -> None:
    scores = np.array([-0.5, 2, 1, 2, 1, 1, -4])
    chosen = {n_rows: best_rows(scores, n_rows) for n_rows in (0, 1, 2, 3, 4, 5, 6, 7, 9)}
    assert {n_rows: rows.tolist() for n_rows, (rows, _) in chosen.items()} == {
        0: [],
        1: [1],
        2: [1, 3],
        3: [1, 2, 3],
        4: [1, 2, 3, 4],
        5: [1, 2, 3, 4, 5],
        6: [0, 1, 2, 3, 4, 5],
        7: [0, 1, 2, 3, 4, 5, 6],
        9: [0, 1, 2, 3, 4, 5, 6],
    }
    inf = np.inf
    assert [margin for _, margin in chosen.values()] == [inf, 0, 1, 0, 0, 1.5, 3.5, inf, inf]


def test_retrieved_rows_have_the_best_scores(cases: Cases) -> None:
    for _, rng in cases(range(100)):
        scores = rng.integers(-3, 3, int(rng.integers(1, 40))) / 4
        n_rows = int(rng.integers(0, 45))
        rows, _ = best_rows(scores, n_rows)
        order = sorted(range(scores.size), key=lambda row: (-scores[row], row))
        assert rows.tolist() == sorted(order[:n_rows])
