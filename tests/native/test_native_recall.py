"""Native recall against the NumPy reference: the same spans and rows, and logits that see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Step, assert_same_rows, clear_steps
from pyh2o import Llama
from pyh2o.cache.kv_cache import KVCache
from pyh2o.reference import Recalled, ReferenceLlama, as_float32
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, kernels_here, tiny_llama

HEAVY, RECENT, RECALL = 24, 20, 30
N_VOCAB = 384

# Keys of two heads, positions that are used up, a policy with last queries of its own, and every
# way to cut a text.
CASES: dict[str, dict[str, Any]] = {
    "one by one": {"slack": 1, "n_head_kv": 2},
    "chunks": {"slack": 12, "n_head_kv": 4},
    "re-based": {"slack": 12, "n_head_kv": 2, "n_pos": 160},
    "dense": {"slack": 12, "n_head_kv": 2, "n_pos": 160, "dense": True},
    "with queries of the policy": {"slack": 12, "n_head_kv": 2, "policy": "snap:queries=8,pool=3"},
}


def models(path: Path, case: dict[str, Any], **settings: Any) -> tuple[ReferenceLlama, Llama]:
    case = dict(case)
    n_head_kv, n_pos = case.pop("n_head_kv"), case.pop("n_pos", 4096)
    dense, policy = case.pop("dense", False), case.pop("policy", "h2o")
    write_tiny_gguf(path, seed=3, n_layer=3, n_head_kv=n_head_kv, n_ctx_train=n_pos)
    reference = ReferenceLlama.from_gguf(
        path,
        heavy=HEAVY,
        recent=RECENT,
        recall_queries=16,
        archive_rounding=as_float32,
        n_pos=n_pos,
        dense=dense,
        policy=policy,
        **case,
    )
    mine: dict[str, Any] = {
        "hh": HEAVY,
        "recent": RECENT,
        "recall": RECALL,
        "recall_type": "f32",
        "positions": "dense" if dense else "original",
        "policy": policy,
        "logits_all": True,
        "n_ctx": 128,
    }
    llm = tiny_llama(path, **mine, **case, **EXACT_ROWS, **settings)
    llm._holds_recalled = True  # nothing is recalled but by the test
    return reference, llm


def recall(llm: Llama, n_rows: int) -> None:
    cache: KVCache = llm._cache._kv
    cache.recall(n_rows)


def assert_same_recall(llm: Llama, expected: Recalled) -> None:
    kv = llm.kv
    assert kv.recalled == expected.n_rows
    assert [(span.start, span.end) for span in llm.recalled()] == [
        (span.start, span.end) for span in expected.spans
    ]
    np.testing.assert_allclose(
        [span.weight for span in llm.recalled()],
        [span.weight for span in expected.spans],
        rtol=1e-3,
    )
    assert kv.hidden_mass == pytest.approx(expected.hidden_mass, abs=1e-5)
    assert kv.missed_mass == pytest.approx(expected.missed_mass, abs=1e-5)


def assert_recalls(llm: Llama, steps: list[Step], recalls: list[int]) -> None:
    for step, n_rows in zip(steps, recalls, strict=True):
        if step.tokens:
            llm.eval(step.tokens)
        else:
            assert llm.remove_tail(step.n_tokens)
        mine = llm.scores[llm.n_tokens - len(step.tokens) : llm.n_tokens]
        np.testing.assert_allclose(mine, step.logits, atol=1e-4, rtol=0)
        assert_same_rows(llm.kv_rows, step.rows)
        if n_rows >= 0:
            recall(llm, n_rows)
        assert_same_recall(llm, step.recalled)


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "-") for name in CASES])
def test_recall_equals_the_reference(tmp_path: Path, rng: np.random.Generator, case: str) -> None:
    """At any moment, in place of what was recalled before, also with an end that is taken back."""
    path = tmp_path / "tiny.gguf"
    reference, llm = models(path, CASES[case])
    size = reference.eviction.slack if reference.eviction else 1
    sizes: list[int] = []
    recalls: list[int] = []
    while len(sizes) < 280 // size:
        sizes.append(size)
        recalls.append(int(rng.choice([-1, 0, 8, RECALL], p=[0.5, 0.1, 0.1, 0.3])))
        if size > 1 and rng.random() < 0.2:
            sizes.append(-int(rng.integers(1, 5)))
            recalls.append(-1)
    steps, reference = clear_steps(reference, rng, sizes, recall=recalls)
    assert any(step.recalled.n_rows == RECALL for step in steps)
    with llm:
        assert_recalls(llm, steps, recalls)
    for attention in ("ops", *kernels_here(path)):
        _, llm = models(path, CASES[case], attention=attention, flash_attn=attention != "ops")
        with llm:
            assert_recalls(llm, steps, recalls)
