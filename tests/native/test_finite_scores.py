"""Scores are finite with any setting, natively and in the NumPy reference."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import read
from pyh2o import Llama
from pyh2o.core.parameters import KV_TYPES
from pyh2o.policies import POLICIES, Policy, parse_policy
from research.reference import ReferenceLlama
from tiny_llama import tiny_llama

N_LAYER, N_HEAD_KV, N_VOCAB, N_POS = 2, 2, 384, 700
TOLERANCE = 2e-4
# The limits of the settings, which exceed those of a float32.
HALF_LIVES = (5e-324, 1e-300, 1e-9, 0.01, 0.3, 1.0, 7.0, 1e9, 1e300)
SIZES = {"n_layer": N_LAYER, "n_head_kv": N_HEAD_KV}
MODEL: dict[str, Any] = {"seed": 8, "n_ctx_train": N_POS, **SIZES}


def both(
    path: Path, policy: str, *, heavy: int, recent: int, slack: int, **settings: Any
) -> tuple[Llama, ReferenceLlama]:
    llm = tiny_llama(
        path,
        policy=policy,
        hh=heavy,
        recent=recent,
        slack=slack,
        n_batch=settings.pop("n_batch", 512),
        type_k=KV_TYPES["f32"],
        type_v=KV_TYPES["f32"],
        **settings,
    )
    rows = {"heavy": heavy, "recent": recent, "slack": slack}
    reference = ReferenceLlama.from_gguf(path, policy=policy, n_pos=N_POS, **rows)
    return llm, reference


def assert_finite(llm: Llama, reference: ReferenceLlama, what: str) -> None:
    for layer in range(N_LAYER):
        assert np.isfinite(llm.kv_rows(layer)[1]).all(), what
        for head in range(N_HEAD_KV):
            assert np.isfinite(reference.scores(layer, head)).all(), what


def assert_equal_rows(llm: Llama, reference: ReferenceLlama, what: str) -> None:
    for layer in range(N_LAYER):
        for head, (positions, scores) in enumerate(zip(*llm.kv_rows(layer), strict=True)):
            np.testing.assert_array_equal(positions, reference.positions(layer, head), what)
            expected = reference.scores(layer, head)
            np.testing.assert_allclose(scores, expected, TOLERANCE, TOLERANCE, err_msg=what)


@pytest.mark.parametrize(
    "policy", ["h2o-far", *(f"h2o-far:near=2,half_life={x}" for x in HALF_LIVES[::2])]
)
def test_a_chunk_of_many_half_lives_equals_the_reference(
    path: Path, rng: np.random.Generator, policy: str
) -> None:
    """The default half-life of two rows is three tokens; a chunk of 500 tokens has 166 of them.

    With hh=1, recent=1 and the default policy most scores used to be nan.
    """
    llm, reference = both(path, policy, heavy=1, recent=1, slack=500)
    tokens = rng.integers(0, N_VOCAB, 640)
    for chunk in (tokens[:500], tokens[500:503], tokens[503:]):
        llm.eval(chunk.tolist())
        read(reference, chunk, ubatch=llm.n_batch)
        assert_finite(llm, reference, policy)
        assert_equal_rows(llm, reference, policy)


def random_value(rng: np.random.Generator, policy: type[Policy], name: str, default: Any) -> Any:
    """Return any value that the policy accepts, extreme values more often."""
    if isinstance(default, bool):
        return bool(rng.integers(2))
    if name == "half_life":
        return float(rng.choice(HALF_LIVES) if rng.integers(2) else 10 ** rng.uniform(-4, 4))
    if isinstance(default, float):
        return float(rng.choice([0, 1, 1e-300, rng.uniform()]))
    value = int(rng.choice([1, 2, 5, 40, 2**31 - 1]))
    return value | 1 if name == "pool" else value


def random_policy(rng: np.random.Generator, name: str) -> str:
    policy = POLICIES[name]
    values = {
        item.name: random_value(rng, policy, item.name, item.default)
        for item in fields(policy)
        if rng.integers(4)
    }
    if name == "h2o-far" and values.get("half_life") == 0:
        del values["half_life"]
    return str(policy(**values))


def test_scores_are_finite_with_any_settings(path: Path, rng: np.random.Generator) -> None:
    """Every policy with random parameters, row counts, chunks, schemes and removed tails."""
    for name in [*POLICIES, "h2o-far", "h2o-decay"]:
        policy = random_policy(rng, name)
        heavy, recent = int(rng.integers(0, 9)), int(rng.choice([1, 2, 9]))
        slack = int(rng.choice([1, 5, 60, 400]))
        n_batch = int(rng.choice([1, 7, 400]))
        what = f"{policy} heavy={heavy} recent={recent} slack={slack} n_batch={n_batch}"
        assert str(parse_policy(policy)) == policy
        llm, reference = both(
            path, policy, heavy=heavy, recent=recent, slack=slack, n_batch=n_batch
        )
        n_tokens = min(heavy + recent + 3 * slack, 450) + 30
        while reference.n_tokens < n_tokens:
            size = int(rng.choice([1, 3, 30, 400]))
            chunk = rng.integers(0, N_VOCAB, size)
            llm.eval(chunk.tolist())
            read(reference, chunk, ubatch=llm.n_batch)
            assert_finite(llm, reference, what)
            n_back = int(rng.integers(0, 3))
            if rng.integers(3) == 0 and llm.text.remove_tail(max(1, llm.n_tokens - n_back)):
                reference.remove(llm.n_tokens)
        llm.close()
