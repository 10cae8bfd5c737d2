"""Policies: their scores against values computed by hand or a second implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o.errors import SettingsError
from pyh2o.policies import (
    H2O,
    H2ODecay,
    H2OMean,
    HeadRows,
    Policy,
    RoCo,
    Snap,
    Streaming,
    parse_policy,
)
from pyh2o.policies.base import SAFE_SCORE
from some_policies import ALL_KINDS

FloatArray = npt.NDArray[np.floating[Any]]


def head_rows(positions: list[int], **changes: Any) -> HeadRows:
    """Return rows with positions and the given inputs; all of them compete."""
    n = len(positions)
    nothing = HeadRows(
        positions=np.array(positions),
        newest=max(positions),
        attention=np.zeros(n),
        squares=np.zeros(n),
        keys=np.zeros((n, 2)),
        value_norms=np.zeros(n),
        query_attention=np.zeros(n),
        queries=np.zeros((0, 1, 2)),
        scale=2**-0.5,
        rope_frequencies=np.ones(1),
        pinned=np.zeros(n, dtype=np.bool_),
        competing=np.ones(n, dtype=np.bool_),
        n_places=1,
        n_recent=1,
        layer=0,
        head=0,
    )
    return replace(nothing, **changes)


def random_rows(rng: np.random.Generator, **changes: Any) -> HeadRows:
    """Return 40 rows of a text of 100, 2 pinned and 8 recent, and 6 queries of 2 heads."""
    n, head_size, n_queries, group = 40, 8, 6, 2
    positions = np.concatenate(
        [[0, 1], np.sort(rng.choice(np.arange(2, 92), n - 10, replace=False)), np.arange(92, 100)]
    )
    query_attention = rng.random((n_queries, n))
    attention = 10 * rng.random(n)
    rows = HeadRows(
        positions=positions,
        newest=99,
        attention=attention,
        # The squares of c numbers with sum a sum to a^2 / c at least and a at most.
        squares=attention**2 / (100 - positions) + rng.random(n),
        keys=rng.standard_normal((n, head_size)),
        value_norms=np.linalg.norm(rng.standard_normal((n, head_size)), axis=1),
        query_attention=(query_attention / query_attention.sum(axis=1, keepdims=True)).sum(axis=0),
        queries=rng.standard_normal((n_queries, group, head_size)),
        query_positions=np.arange(94, 100),
        scale=head_size**-0.5,
        rope_frequencies=100.0 ** -np.linspace(0, 0.75, head_size // 2),
        pinned=positions < 2,
        competing=(positions >= 2) & (positions < 92),
        n_places=10,
        n_recent=8,
        layer=3,
        head=1,
    )
    return replace(rows, **changes)


def test_a_larger_budget_has_a_longer_half_life() -> None:
    policy = parse_policy("h2o-far:near=8")
    assert str(policy.for_budget(200)) == "h2o-far:near=8,half_life=300"
    fixed = parse_policy("h2o-far:half_life=10")
    assert fixed.for_budget(200) == fixed
    assert parse_policy("snap").for_budget(200) == parse_policy("snap")
    with pytest.raises(SettingsError, match="half_life is 0: call"):
        policy.score(head_rows([0, 1]))


def test_a_policy_needs_only_parameters_and_a_score() -> None:
    """Parameters need no limits."""

    @dataclass(frozen=True)
    class Oldest(Policy):
        weight: float = 1.0

        def score(self, rows: HeadRows) -> FloatArray:
            return -self.weight * rows.positions

    assert str(Oldest(weight=2)) == f"{__name__}:{Oldest.__qualname__}:weight=2"
    assert Oldest().score(head_rows([3, 4])).tolist() == [-3, -4]


def test_h2o_scores_by_the_sum() -> None:
    rows = head_rows([3, 5, 6], attention=np.array([2.0, 0.5, 1.0]))
    for policy in (H2O(), H2ODecay()):
        assert policy.score(rows).tolist() == [2.0, 0.5, 1.0]


def test_h2o_mean_divides_by_the_queries_that_saw_the_row() -> None:
    """At newest 9 position 0 was seen by 10 queries, 5 by 5 and 9 by itself."""
    rows = head_rows([0, 5, 9], attention=np.array([2.0, 1.5, 0.25]))
    assert H2OMean().score(rows).tolist() == [0.2, 0.3, 0.25]


def test_roco_ranks_the_highest_deviations_first() -> None:
    """Means .5, .5, .4, .2 and mean squares .25, .34, .16, .2: deviations 0, .3, 0, .4."""
    ages = np.array([10, 9, 8, 7])
    rows = head_rows(
        [0, 1, 2, 3],
        newest=9,
        attention=np.array([0.5, 0.5, 0.4, 0.2]) * ages,
        squares=np.array([0.25, 0.34, 0.16, 0.2]) * ages,
        n_places=3,
    )
    safe = SAFE_SCORE
    np.testing.assert_allclose(RoCo(guard=0.34).score(rows), [0.5, 0.5, 0.4, safe])
    np.testing.assert_allclose(RoCo(guard=0.67).score(rows), [0.5, safe, 0.4, safe])
    np.testing.assert_allclose(RoCo(guard=0.33).score(rows), [0.5, 0.5, 0.4, 0.2])


def test_roco_protects_the_newer_of_equal_deviations() -> None:
    """Rounding makes the variance of constant attention negative, which counts as 0."""
    rows = head_rows(
        [4, 5, 6, 7],
        newest=9,
        attention=np.array([6, 5, 4, 3]) * 0.1,
        squares=np.array([6, 5, 4, 3]) * 0.1**2 * (1 - 1e-9),
        n_places=2,
    )
    scores = RoCo(guard=0.5).score(rows)
    np.testing.assert_allclose(scores, [0.1, 0.1, 0.1, SAFE_SCORE])


def test_roco_protects_only_competing_rows(rng: np.random.Generator) -> None:
    rows = random_rows(rng)
    scores = RoCo(guard=1).score(rows)
    assert (scores == SAFE_SCORE).sum() == rows.n_places
    assert not (scores[~rows.competing] == SAFE_SCORE).any()
    np.testing.assert_array_equal(RoCo(guard=0).score(rows), H2OMean().score(rows))


def test_roco_equals_easykvs_rule(rng: np.random.Generator) -> None:
    """Its rule: of the rows with the smallest deviations evict the smallest mean, one by one.

    With one evicted row the k rows of smallest deviation are all but the protected ones.
    """
    rows = random_rows(rng, n_places=29)
    guard = 0.3
    scores = RoCo(guard=guard).score(rows)
    competing = np.flatnonzero(rows.competing)
    ours = competing[np.argmin(scores[competing])]

    count = (100 - rows.positions)[competing]
    mean = rows.attention[competing] / count
    std = np.sqrt(rows.squares[competing] / count - mean**2)
    feasible = np.argsort(std)[: competing.size - int(guard * 29)]
    theirs = competing[feasible[np.argmin(mean[feasible])]]
    assert ours == theirs


def test_snap_pools_over_competing_neighbours() -> None:
    """Sums 1, 2, 6, 4, 8, 16; the pinned 6 and the recent 16 are not pooled."""
    rows = head_rows(
        [0, 1, 2, 3, 4, 5],
        query_attention=np.array([1.0, 2, 6, 4, 8, 16]),
        competing=np.array([True, True, False, True, True, False]),
    )
    competing = rows.competing
    assert Snap(pool=1).score(rows)[competing].tolist() == [1, 2, 4, 8]
    np.testing.assert_allclose(Snap(pool=3).score(rows)[competing], [3 / 2, 7 / 3, 14 / 3, 12 / 2])
    np.testing.assert_allclose(Snap(pool=5).score(rows)[competing], [7 / 3, 15 / 4, 15 / 4, 14 / 3])
    np.testing.assert_allclose(Snap(pool=99_999).score(rows)[competing], [15 / 4] * 4)


def test_without_queries_the_newer_rows_stay() -> None:
    assert Snap().score(head_rows([0, 1, 2])).tolist() == [0, 0, 0]


def test_streaming_keeps_sinks_and_a_window() -> None:
    rows = head_rows([0, 2, 3, 4, 50, 51])
    assert Streaming().score(rows).tolist() == [SAFE_SCORE, SAFE_SCORE, SAFE_SCORE, 4, 50, 51]
    assert Streaming(sinks=0).score(rows).tolist() == [0, 2, 3, 4, 50, 51]


@pytest.mark.parametrize("policy", ALL_KINDS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_are_finite_and_inputs_unchanged(
    rng: np.random.Generator, policy: Policy, dtype: npt.DTypeLike
) -> None:
    rows = random_rows(rng)
    arrays = {name: value for name, value in vars(rows).items() if isinstance(value, np.ndarray)}
    floats = {name: x.astype(dtype) for name, x in arrays.items() if x.dtype == np.float64}
    before = {name: x.copy() for name, x in floats.items()}

    scores = policy.for_budget(20).score(replace(rows, **floats))

    assert scores.shape == (40,)
    assert not np.isnan(scores).any()
    for name, x in before.items():
        np.testing.assert_array_equal(floats[name], x)
