"""Codes of archived keys and retrieval by them, on random numbers without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from random_cases import Cases
from research.reference import N_PAGE, as_float16, encode, estimates
from research.reference.codes import LARGEST, hadamard

FloatArray = npt.NDArray[np.floating[Any]]


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


def test_equal_keys_and_zero_queries_have_estimates(rng: np.random.Generator) -> None:
    """Without a difference to the centre there is no scale; without a query there is no step."""
    key = as_float16(rng.standard_normal(32)).astype(np.float64)
    codes = encode(np.stack([key, key, key]))
    assert codes.scales.tolist() == [0, 0, 0]
    queries = np.stack([rng.standard_normal(32), np.zeros(32)])
    expected = (queries @ key)[:, None] + np.zeros(3)
    np.testing.assert_allclose(estimates([codes], queries), expected)
