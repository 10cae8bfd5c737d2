"""The native library against the NumPy reference: same rows, scores and logits at every step."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o import Llama
from pyh2o.cache.settings import Attention
from pyh2o.llama import KV_TYPES
from pyh2o.reference import ReferenceLlama
from tiny_gguf import write_tiny_gguf
from tiny_llama import chose_clearly, kernels_here, tiny_llama

HEAVY, RECENT = 12, 9
N_LAYER, N_VOCAB = 3, 384


def reference_of(path: Path, slack: int) -> ReferenceLlama:
    return ReferenceLlama.from_gguf(path, heavy=HEAVY, recent=RECENT, slack=slack)


def chunks(tokens: npt.NDArray[np.int64], size: int) -> list[list[int]]:
    return [tokens[i : i + size].tolist() for i in range(0, len(tokens), size)]


def text_with_clear_choices(
    path: Path, rng: np.random.Generator, *, n: int, slack: int, ubatch: int
) -> npt.NDArray[np.int64]:
    """Random tokens whose every compaction is decided by more than rounding."""
    while True:
        tokens = rng.integers(0, N_VOCAB, n)
        reference = reference_of(path, slack)
        for chunk in chunks(tokens, ubatch):
            reference.eval(chunk, ubatch=ubatch)
        if chose_clearly(reference):
            return tokens


def llama_of(
    path: Path, *, slack: int, ubatch: int, kv_type: str, flash_attn: bool, attention: Attention
) -> Llama:
    if attention not in ("auto", "ops", *kernels_here(path)):
        pytest.skip(f"this machine has no {attention}")
    return tiny_llama(
        path,
        hh=HEAVY,
        recent=RECENT,
        slack=slack,
        n_ubatch=ubatch,
        type_k=KV_TYPES[kv_type],
        type_v=KV_TYPES[kv_type],
        flash_attn=flash_attn,
        attention=attention,
        logits_all=True,
    )


def assert_same_rows(llm: Llama, reference: ReferenceLlama, n_head_kv: int) -> None:
    """Equal positions and scores of every (layer, KV head)."""
    for layer in range(N_LAYER):
        positions, scores = llm.kv_rows(layer)
        assert len(positions) == n_head_kv
        for head in range(n_head_kv):
            pair = f"layer {layer}, KV head {head}, after {llm.n_tokens} tokens"
            np.testing.assert_array_equal(
                positions[head], reference.positions(layer, head), err_msg=pair
            )
            np.testing.assert_allclose(
                scores[head], reference.scores(layer, head), atol=1e-4, rtol=1e-4, err_msg=pair
            )


@pytest.mark.parametrize("n_head_kv", [2, 4], ids=["gqa", "mha"])
@pytest.mark.parametrize("ubatch", [1, 32])
@pytest.mark.parametrize("slack", [1, 7])
@pytest.mark.parametrize("attention", get_args(Attention))
def test_every_step_equals_the_reference(
    tmp_path: Path,
    rng: np.random.Generator,
    attention: Attention,
    slack: int,
    ubatch: int,
    n_head_kv: int,
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=N_LAYER, n_head_kv=n_head_kv)
    n = 320 if ubatch == 1 else 640
    tokens = text_with_clear_choices(path, rng, n=n, slack=slack, ubatch=ubatch)
    reference = reference_of(path, slack)
    # ggml's op for flash attention rounds f32 rows to f16
    llm = llama_of(
        path,
        slack=slack,
        ubatch=ubatch,
        kv_type="f32",
        flash_attn=attention != "ops",
        attention=attention,
    )
    for chunk in chunks(tokens, ubatch):
        expected = reference.eval(chunk, ubatch=ubatch)
        llm.eval(chunk)
        np.testing.assert_allclose(
            llm.scores[llm.n_tokens - len(chunk) : llm.n_tokens], expected, atol=1e-4, rtol=0
        )
        assert_same_rows(llm, reference, n_head_kv)
    assert llm.kv.compactions == reference.n_compactions > 10


@pytest.mark.parametrize(("n_head", "n_head_kv"), [(16, 8), (9, 3)])
def test_probabilities_that_are_computed_in_parts(
    tmp_path: Path, rng: np.random.Generator, n_head: int, n_head_kv: int
) -> None:
    """Of a long prompt those beside flash attention are, a few KV heads at a time."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        seed=3,
        n_layer=1,  # flash attention rounds what the next layer reads
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
        type_k=KV_TYPES["f32"],
        type_v=KV_TYPES["f32"],
        flash_attn=True,
        attention="ops",
    )
    reference.eval(tokens, ubatch=512)
    llm.eval(tokens)

    positions, scores = llm.kv_rows(0)
    for head in range(n_head_kv):
        np.testing.assert_array_equal(positions[head], np.arange(len(tokens)))
        np.testing.assert_allclose(scores[head], reference.scores(0, head), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["h2o-far", "roco", "snap", "expected", "nacl"])
def test_the_graph_of_a_deep_model_has_room_for_all_parts(tmp_path: Path, policy: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=32, n_head=16, n_head_kv=16)
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
    """Logits (std 1) are equal but for rounding, until rounding decides a close choice.

    From then on most kept rows are still shared, and so most of the logits.
    """
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=N_LAYER)
    # At most one compaction in each part, so that no other choice goes by unseen.
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
    for chunk in chunks(rng.integers(0, N_VOCAB, 400), ubatch):
        expected = reference.eval(chunk, ubatch=ubatch)
        llm.eval(chunk)
        error = np.abs(llm.scores[llm.n_tokens - len(chunk) : llm.n_tokens] - expected)
        errors.append(error.mean())
        shared.extend(shared_rows(llm, reference))
        if min(shared) == 1.0:
            assert error.max() < rounding
    assert llm.kv.compactions == reference.n_compactions > 10
    assert np.mean(shared) > least_shared
    assert np.mean(errors) < 0.4


def shared_rows(llm: Llama, reference: ReferenceLlama) -> list[float]:
    """For every (layer, KV head) the share of kept rows that the reference keeps as well."""
    shares = []
    for layer in range(N_LAYER):
        positions, _ = llm.kv_rows(layer)
        for head, kept in enumerate(positions):
            both = np.intersect1d(kept, reference.positions(layer, head))
            shares.append(len(both) / len(kept))
    return shares
