"""The native library against the NumPy reference: equal rows, scores and logits at every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oracle import assert_same_rows, assert_same_steps, clear_steps, read, rows_of, shared_rows
from pyh2o import Llama
from pyh2o.cache.settings import Attention
from research.reference import ReferenceLlama
from some_policies import in_research
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, exact_kernels, stored_as, tiny_llama

HEAVY, RECENT = 12, 9
N_LAYER, N_VOCAB = 3, 384


def reference_of(path: Path, slack: int) -> ReferenceLlama:
    return ReferenceLlama.from_gguf(path, heavy=HEAVY, recent=RECENT, slack=slack)


def llama_of(
    path: Path, *, slack: int, ubatch: int, kv_type: str, flash_attn: bool, attention: Attention
) -> Llama:
    return tiny_llama(
        path,
        hh=HEAVY,
        recent=RECENT,
        slack=slack,
        n_ubatch=ubatch,
        **stored_as(kv_type),
        flash_attn=flash_attn,
        attention=attention,
        logits_all=True,
    )


@pytest.mark.parametrize(
    ("slack", "ubatch", "n_head_kv"),
    [(1, 1, 2), (1, 32, 4), (7, 1, 4), (7, 32, 2)],
    ids=["1-1-gqa", "1-32-mha", "7-1-mha", "7-32-gqa"],
)
def test_every_step_equals_the_reference(
    tmp_path: Path, rng: np.random.Generator, slack: int, ubatch: int, n_head_kv: int
) -> None:
    """With every attention implementation of this machine."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=N_LAYER, n_head_kv=n_head_kv)
    steps, reference = clear_steps(reference_of(path, slack), rng, [ubatch] * (320 // ubatch))
    for attention in ("auto", "ops", *exact_kernels(path)):
        # ggml's flash attention rounds f32 rows to f16
        with llama_of(
            path,
            slack=slack,
            ubatch=ubatch,
            kv_type="f32",
            flash_attn=attention != "ops",
            attention=attention,
        ) as llm:
            assert_same_steps(llm, steps)
            assert llm.kv.compactions == reference.n_compactions > 10


@pytest.mark.parametrize(("n_head", "n_head_kv"), [(16, 8), (9, 3)])
def test_probabilities_computed_in_parts_equal_the_reference(
    tmp_path: Path, rng: np.random.Generator, n_head: int, n_head_kv: int
) -> None:
    """The probabilities of a long prompt, alongside flash attention, a few KV heads at a time."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        seed=3,
        n_layer=1,  # flash attention rounds the input of the next layer
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_size=16,
    )
    budget = {"recent": 1000, "slack": 536}
    tokens: list[int] = rng.integers(0, N_VOCAB, 1536).tolist()
    reference = ReferenceLlama.from_gguf(path, heavy=500, **budget)
    llm = tiny_llama(
        path,
        n_ctx=4096,
        hh=500,
        **budget,
        n_batch=512,
        n_ubatch=512,
        **EXACT_ROWS,
        flash_attn=True,
        attention="ops",
    )
    read(reference, tokens)
    llm.eval(tokens)

    assert len(llm.kv_rows(0)[0][0]) == len(tokens)
    assert_same_rows(llm.kv_rows, rows_of(reference))


@pytest.mark.parametrize("policy", ["h2o-far", "roco", "snap", in_research("expected:Expected")])
def test_the_graph_of_a_deep_model_fits_all_parts(tmp_path: Path, policy: str) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, n_layer=32, n_head=16, n_head_kv=16, head_size=16
    )
    with tiny_llama(
        path,
        n_ctx=4096,
        hh=500,
        recent=1000,
        slack=548,
        policy=policy,
        n_batch=512,
        n_ubatch=512,
        flash_attn=True,
        attention="ops",
    ) as llm:
        llm.eval(list(range(300)))
        assert llm.n_tokens == 300


@pytest.mark.parametrize(
    ("kv_type", "flash_attn", "attention", "rounding", "least_shared"),
    [
        ("f16", False, "ops", 0.02, 0.95),
        ("f16", True, "ops", 0.02, 0.95),
        ("f16", True, "auto", 0.02, 0.95),
        ("q8_0", True, "ops", 0.3, 0.92),
        ("q8_0", True, "auto", 0.3, 0.92),
        ("q4_0", True, "ops", 2.0, 0.85),
        ("q4_0", True, "auto", 2.0, 0.85),
    ],
)
def test_rounded_rows_stay_close_to_the_reference(
    tmp_path: Path,
    rng: np.random.Generator,
    kv_type: str,
    flash_attn: bool,
    attention: Attention,
    rounding: float,
    least_shared: float,
) -> None:
    """Logits (std 1) are equal up to rounding until rounding decides a close choice.

    After that most kept rows are still the same, and so are most logits.
    """
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=N_LAYER)
    # At most one compaction in each part, so that every choice is seen.
    slack = ubatch = 7
    reference = reference_of(path, slack)
    llm = llama_of(
        path,
        slack=slack,
        ubatch=ubatch,
        kv_type=kv_type,
        flash_attn=flash_attn,
        attention=attention,
    )
    shared: list[float] = []
    errors: list[float] = []
    for _ in range(57):
        chunk = rng.integers(0, N_VOCAB, ubatch).tolist()
        expected = read(reference, chunk, ubatch=ubatch)
        llm.eval(chunk)
        error = np.abs(llm.scores[llm.n_tokens - len(chunk) : llm.n_tokens] - expected)
        errors.append(error.mean())
        shared.extend(shared_rows(llm, reference))
        if min(shared) == 1.0:
            assert error.max() < rounding
    assert llm.kv.compactions == reference.n_compactions > 10
    assert np.mean(shared) > least_shared
    assert np.mean(errors) < 0.4
