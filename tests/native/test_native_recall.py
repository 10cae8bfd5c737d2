"""Native recall against the NumPy reference: the same spans and rows, and logits that see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Step, assert_same_rows, clear_steps
from pyh2o import Llama
from pyh2o.cache.kv_cache import KVCache
from pyh2o.errors import NativeError
from pyh2o.reference import Recalled, ReferenceLlama, as_float32
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, exact_kernels, tiny_llama, tiny_parent, told_to_recall

HEAVY, RECENT, RECALL = 24, 20, 30
N_VOCAB = 384

# Keys of two heads, positions that are used up, a policy with last queries of its own, and every
# way to cut a text.
CASES: dict[str, dict[str, Any]] = {
    "one by one": {"slack": 1, "n_head_kv": 2},
    "chunks": {"slack": 12, "n_head_kv": 4},
    "re-based": {"slack": 12, "n_head_kv": 2, "n_pos": 160},
    "dense": {"slack": 12, "n_head_kv": 2, "n_pos": 160, "dense": True},
    "few positions of LongRoPE": {
        "slack": 12,
        "n_head_kv": 2,
        "arch_variant": "llama_longrope",
        "n_ctx_train": 1024,
        "n_pos": 256,
    },
    "many positions of LongRoPE": {
        "slack": 12,
        "n_head_kv": 2,
        "arch_variant": "llama_longrope",
        "n_pos": 160,
    },
    "with queries of the policy": {"slack": 12, "n_head_kv": 2, "policy": "snap:queries=8,pool=3"},
    "with all keys": {"slack": 12, "n_head_kv": 2, "policy": "keydiff"},
}


def models(path: Path, case: dict[str, Any], **settings: Any) -> tuple[ReferenceLlama, Llama]:
    case = dict(case)
    n_head_kv, n_pos = case.pop("n_head_kv"), case.pop("n_pos", 4096)
    dense, policy = case.pop("dense", False), case.pop("policy", "h2o")
    model = {name: case.pop(name) for name in ("arch_variant", "n_ctx_train") if name in case}
    write_tiny_gguf(path, seed=3, n_head_kv=n_head_kv, **{"n_ctx_train": n_pos, **model})
    reference = ReferenceLlama.from_gguf(
        path,
        heavy=HEAVY,
        recent=RECENT,
        recall_queries=32,
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
    return reference, told_to_recall(path, **mine, **case, **EXACT_ROWS, **settings)


def recall(llm: Llama, n_rows: int, n_asking: int = 32) -> None:
    cache: KVCache = llm._cache._kv
    cache.recall(n_rows, n_asking)


def recall_masses(llm: Llama, n_rows: int) -> tuple[float, float]:
    """Hidden and missed, once that many rows are recalled."""
    recall(llm, n_rows)
    return llm.kv.hidden_mass, llm.kv.missed_mass


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
    for attention in ("ops", *exact_kernels(path)):
        _, llm = models(path, CASES[case], attention=attention, flash_attn=attention != "ops")
        with llm:
            assert_recalls(llm, steps, recalls)


def test_what_is_recalled_again_follows_the_text(tmp_path: Path, rng: np.random.Generator) -> None:
    """No further behind than a third of the positions, also where the choice is the same."""
    case = {"slack": 12, "n_head_kv": 2, "n_pos": 160}
    reference, llm = models(tmp_path / "tiny.gguf", case)
    sizes = [12] * 9 + [3] * 14
    recalls = [-1] * 9 + [1] * 14
    steps, _ = clear_steps(reference, rng, sizes, recall=recalls)
    spans = [[(span.start, span.end) for span in step.recalled.spans] for step in steps[9:]]
    places = [step.recalled.places.tolist() for step in steps[9:]]
    positions = [step.recalled.positions.tolist() for step in steps[9:]]
    assert any(
        spans[i] == spans[i - 1] and positions[i] == positions[i - 1] and places[i] != places[i - 1]
        for i in range(1, len(spans))
    )
    with llm:
        assert_recalls(llm, steps, recalls)


def test_as_many_tokens_ask_as_are_said(tmp_path: Path, rng: np.random.Generator) -> None:
    """Of more than 16 tokens not all queries do; what is no longer recent does not."""
    reference, llm = models(tmp_path / "tiny.gguf", CASES["chunks"])
    steps, reference = clear_steps(reference, rng, [12] * 12)
    for step in steps:
        llm.eval(step.tokens)
    weights = []
    for n_asking in (1, 7, 16, 18, RECENT, 32):
        reference.recall(RECALL, n_asking)
        recall(llm, RECALL, n_asking)
        if reference.recalled.margin > 1e-3:
            assert_same_recall(llm, reference.recalled)
        assert llm.kv.hidden_mass == pytest.approx(reference.recalled.hidden_mass, abs=1e-5)
        weights.append(llm.kv.hidden_mass)
    assert len(set(weights[:-1])) == 5
    assert weights[-2] == weights[-1]
    with pytest.raises(NativeError, match="out of range"):
        recall(llm, RECALL, 0)
    assert llm.kv.recalled == RECALL
    llm.close()


@pytest.mark.parametrize(
    ("kv_type", "close"),
    # some five times the spread of twelve random models
    [(1, 0.01), (2, 0.08), (6, 0.04), (8, 0.01), (30, 0.01)],
    ids=["f16", "q4_0", "q5_0", "q8_0", "bf16"],
)
def test_keys_of_every_type_are_looked_at(
    tmp_path: Path, rng: np.random.Generator, kv_type: int, close: float
) -> None:
    """Those of quantised types lie mixed in the cache, and re-bases turn them."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        seed=3,
        n_layer=1,
        n_head=2,
        n_head_kv=2,
        head_size=64,
        n_ctx_train=160,
    )
    tokens = rng.integers(0, N_VOCAB, 400).tolist()
    masses = []
    for stored in (EXACT_ROWS, {"type_k": kv_type, "type_v": 1}):
        with tiny_llama(
            path,
            policy="streaming",
            hh=8,
            recent=60,
            slack=12,
            recall=60,
            recall_type="f16",
            **stored,
        ) as llm:
            llm._holds_recalled = True  # nothing is recalled but by the test
            llm.eval(tokens)
            assert llm.kv.rebases > 1
            assert recall_masses(llm, 0)[0] > 0.1
            masses.append(recall_masses(llm, 60))
    # there is one layer: what is stored changes its logits, but none of its queries
    np.testing.assert_allclose(masses[1], masses[0], atol=close, rtol=0)


def test_an_archive_alone_changes_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    """Invariant 10, bit for bit."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    tokens: list[int] = rng.integers(0, N_VOCAB, 300).tolist()
    budget: dict[str, Any] = {"hh": HEAVY, "recent": RECENT, "slack": 12, "logits_all": True}
    with (
        tiny_llama(path, **budget) as plain,
        tiny_llama(path, recall=RECALL, **budget) as archiving,
    ):
        archiving._holds_recalled = True
        for llm in (plain, archiving):
            llm.eval(tokens)
        np.testing.assert_array_equal(archiving.scores[:300], plain.scores[:300])
        assert (plain.kv.archived, plain.kv.bytes_archive) == (0, 0)
        assert archiving.kv.archived == 300 - RECENT - archiving.kv.used + HEAVY + RECENT


def test_with_everything_recalled_it_is_the_full_cache(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """After a prompt that was read in full, whose rows are those of the full cache."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_head_kv=2)
    tokens: list[int] = rng.integers(0, N_VOCAB, 200).tolist()
    full = tiny_parent(path, n_ctx=256, logits_all=True, **EXACT_ROWS)
    full.eval(tokens)
    budget: dict[str, Any] = {"hh": HEAVY, "recent": RECENT, "slack": 12, "n_ctx": 600}
    with tiny_llama(
        path,
        recall=400,
        recall_type="f32",
        prefill="exact",
        logits_all=True,
        **budget,
        **EXACT_ROWS,
    ) as llm:
        llm.eval(tokens[:190])
        assert llm.kv.used == HEAVY + RECENT
        recall(llm, 400)
        assert llm.kv.recalled == 190 - HEAVY - RECENT
        assert llm.kv.missed_mass == pytest.approx(0, abs=1e-6) != llm.kv.hidden_mass
        llm._holds_recalled = True
        llm.eval(tokens[190:])
        np.testing.assert_allclose(llm.scores[190:200], full.scores[190:200], atol=1e-4)
