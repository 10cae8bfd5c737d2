"""Scores of every n-th query of a prompt, where they cost a second look at K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import assert_same_rows, clear_steps
from pyh2o import Llama
from research.reference import ReferenceLlama
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, assert_same_cache, random_tokens, tiny_llama

HEAVY, RECENT, SLACK = 30, 12, 24
# Batches of all sizes: the last token is taken whatever is left over, those of few are exact.
SIZES = [24, 24, 1, 24, 22, 15, 23, 1, 1, 24, 21, 24, 16, 24, 13]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    # flash attention rounds what a next layer reads
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=1)


def llama_of(path: Path, **settings: Any) -> Llama:
    """With scores beside ggml's flash attention, unless told otherwise."""
    budget = {"hh": HEAVY, "recent": RECENT, "slack": SLACK, "n_ubatch": SLACK, "recall": 0}
    way = {"attention": "ops", "flash_attn": True, **EXACT_ROWS}
    return tiny_llama(path, **{**budget, **way, **settings})


@pytest.mark.parametrize("every", [1, 2, 4, 5])
@pytest.mark.parametrize("policy", ["h2o", "h2o-far:near=4,half_life=40", "roco"])
def test_rows_and_scores_are_those_of_the_reference(
    path: Path, rng: np.random.Generator, policy: str, every: int
) -> None:
    reference = ReferenceLlama.from_gguf(
        path, heavy=HEAVY, recent=RECENT, slack=SLACK, policy=policy, score_every=every
    )
    steps, reference = clear_steps(reference, rng, SIZES, margin=1e-5)
    with llama_of(path, policy=policy, score_every=every) as llm:
        for step in steps:
            llm.eval(step.tokens)
            assert_same_rows(llm.kv_rows, step.rows, where=f"after {llm.n_tokens} tokens")
        assert llm.kv.compactions == reference.n_compactions > 5


def test_sums_stay_what_they_count(path: Path, rng: np.random.Generator) -> None:
    """While nothing is evicted they sum to the number of queries; others are taken than all."""
    tokens = random_tokens(rng, 47)
    settings = {"policy": "h2o", "slack": 256, "n_ubatch": 256}
    with llama_of(path, **settings) as every_one, llama_of(path, score_every=4, **settings) as some:
        for llm in (every_one, some):
            llm.eval(tokens)
            for scores in llm.kv_rows(0)[1]:
                np.testing.assert_allclose(scores.sum(), 47, rtol=1e-5)
        assert not np.allclose(every_one.kv_rows(0)[1], some.kv_rows(0)[1], rtol=1e-2)


@pytest.mark.parametrize(
    "settings",
    [{"recall": 6}, {"flash_attn": False}, {"attention": "auto"}],
    ids=["searched", "with the attention", "our kernels"],
)
def test_elsewhere_nothing_changes(
    path: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    tokens = random_tokens(rng, 200)
    with llama_of(path, **settings) as one, llama_of(path, score_every=4, **settings) as other:
        for llm in (one, other):
            llm.eval(tokens)
        assert_same_cache(one, other)


def test_a_state_goes_on_under_another_number(path: Path, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 200)
    with llama_of(path, score_every=4) as one, llama_of(path) as other:
        one.eval(tokens)
        other.load_state(one.save_state())
        assert_same_cache(one, other)


@pytest.mark.parametrize("every", [2, 64, 2**40])
def test_the_graph_has_room(tmp_path: Path, rng: np.random.Generator, every: int) -> None:
    """Of a deep model, for batches of which some are taken and for larger ones that are exact."""
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=3, n_layer=32, n_head=16, n_head_kv=16, head_size=16
    )
    sizes = {"n_ctx": 4096, "hh": 500, "recent": 1000, "slack": 548, "n_ubatch": 512}
    with llama_of(path, policy="roco", n_batch=512, score_every=every, **sizes) as llm:
        for n in (512, 255, 512, 512, 255):
            llm.eval(random_tokens(rng, n))
        assert llm.kv.compactions == 0
        llm.eval(random_tokens(rng, 512))
        assert llm.kv.compactions == 1
