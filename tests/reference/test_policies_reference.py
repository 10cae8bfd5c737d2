"""Every policy in the NumPy reference: which rows it keeps and which inputs it collects."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o.policies import (
    POLICIES,
    H2ODecay,
    Policy,
    RoCo,
    Snap,
    Streaming,
    parse_policy,
)
from research.reference import (
    EvictionParameters,
    ReferenceLlama,
)
from some_policies import EXAMPLES, in_research
from tiny_gguf import write_tiny_gguf

IntArray = npt.NDArray[np.int64]

N_LAYER, N_HEAD_KV, GROUP, HEAD_SIZE = 3, 2, 2, 8

# Small windows of queries and shares that need rounding, so that every part of a rule matters.
ALL_POLICIES = [
    *(cls() for cls in POLICIES.values()),
    *map(parse_policy, EXAMPLES),
    Snap(queries=3, pool=3),
    parse_policy(in_research("random_rows:NACL:queries=4,random=0.5,seed=9")),
    RoCo(guard=0.6),
    H2ODecay(half_life=5),
    Streaming(sinks=100),
]
all_policies = pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=6)


def random_tokens(rng: np.random.Generator, n_tokens: int) -> IntArray:
    return rng.integers(3, 384, n_tokens)


def in_float64(path: Path, **settings: Any) -> ReferenceLlama:
    """In float64 rounding cannot change a choice."""
    return ReferenceLlama.from_gguf(path, dtype=np.float64, cache_dtype=np.float64, **settings)


def heads(model: ReferenceLlama) -> list[tuple[int, int]]:
    hyper = model.weights.hyperparameters
    return list(itertools.product(range(hyper.n_layer), range(hyper.n_head_kv)))


def kept_positions(model: ReferenceLlama) -> list[list[int]]:
    return [model.positions(layer, head).tolist() for layer, head in heads(model)]


def random_parameters(rng: np.random.Generator, n_rows: int) -> EvictionParameters:
    pinned, heavy = (int(count) for count in rng.integers(0, 15, 2))
    bounds = np.sort(rng.choice(np.arange(n_rows + 20), 4, replace=False)).tolist()
    spans = ((bounds[0], bounds[1]), (bounds[2], bounds[3]))
    n_starts = int(rng.integers(0, 4))
    starts = np.sort(rng.choice(np.arange(1, n_rows + 10), n_starts, replace=False)).tolist()
    try:
        return EvictionParameters(
            heavy=heavy,
            recent=int(rng.integers(1, 12)),
            pinned=pinned,
            spans=spans if rng.random() < 0.5 else (),
            starts=tuple(starts),
        )
    except ValueError:  # more spans than heavy rows
        return random_parameters(rng, n_rows)


@all_policies
def test_dropping_rows_equals_masking_them(
    tiny: Path, rng: np.random.Generator, policy: Policy
) -> None:
    """Over a long text with a removed tail, re-bases, spans and shares."""
    tokens = random_tokens(rng, 210)
    dropping, hiding = (
        in_float64(
            tiny,
            heavy=20,
            recent=14,
            pinned=2,
            slack=8,
            n_pos=128,
            policy=policy,
            keep_all=keep_all,
        )
        for keep_all in (False, True)
    )
    for model in (dropping, hiding):
        model.eval(tokens[:100])
        model.remove(97)
        model.pin_spans([(60, 64), (130, 135)])
        model.share_fairly([40, 120])
    np.testing.assert_allclose(dropping.eval(tokens[100:]), hiding.eval(tokens[100:]), atol=1e-8)
    assert dropping.n_compactions == hiding.n_compactions > 15
    assert dropping.n_rebases == hiding.n_rebases >= 2
    assert kept_positions(dropping) == kept_positions(hiding)
    for layer, head in heads(dropping):
        np.testing.assert_allclose(dropping.scores(layer, head), hiding.scores(layer, head))
        assert dropping.positions(layer, head).size == dropping.n_rows
        assert np.isin(np.arange(130, 135), dropping.positions(layer, head)).all()


def test_policies_keep_different_rows(tiny: Path, rng: np.random.Generator) -> None:
    """Otherwise the tests above would miss a policy that is not called."""
    tokens = random_tokens(rng, 250)
    # Over so few tokens the default half-life hardly matters. The tiny model's rows whose attention
    # varies most also have the highest mean.
    stronger = {"h2o-decay": "h2o-decay:half_life=20", "roco": "roco:guard=1"}
    kept = []
    for name in [*POLICIES, *EXAMPLES]:
        policy = stronger.get(name, name)
        model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=12, slack=4, policy=policy)
        model.eval(tokens)
        kept.append(str(kept_positions(model)))
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize(
    ("policy", "sets"),
    [("h2o", 6), (in_research("one_choice:H2OLayer"), 3), (in_research("one_choice:H2OCells"), 1)],
)
def test_grouped_heads_keep_the_same_rows(
    tiny: Path, rng: np.random.Generator, policy: str, sets: int
) -> None:
    model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=12, slack=4, policy=policy)
    model.eval(random_tokens(rng, 250))
    assert len({str(positions) for positions in kept_positions(model)}) == sets
    of_layers = {str([model.positions(layer, head) for head in range(2)]) for layer in range(3)}
    assert len(of_layers) == (1 if sets == 1 else 3)
    # Each head keeps its own sums.
    assert len({str(model.scores(layer, head)) for layer, head in heads(model)}) == 6
