"""Recall after removing a tail, clearing a text and exact prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import read
from pyh2o import Llama
from research.reference import ReferenceLlama, as_float16
from tiny_llama import EXACT_ROWS, assert_same_future, random_tokens, tiny_llama

HEAVY, RECENT, SLACK, RECALL = 24, 20, 12, 30


MODEL: dict[str, Any] = {"seed": 3}


def recall_llama(path: Path, **settings: Any) -> Llama:
    sizes = {"hh": HEAVY + RECALL, "recent": RECENT, "slack": SLACK, "recall": RECALL}
    return tiny_llama(path, **{**sizes, "n_ctx": 128, "logits_all": True, **settings})


@pytest.mark.parametrize("attention", ["auto", "ops"])
def test_a_tail_removed_to_a_mark_leaves_no_trace(
    path: Path, rng: np.random.Generator, attention: str
) -> None:
    """Rows retrieved for the tail leave no trace, in whatever chunks the tail was read."""
    llm, alone = (recall_llama(path, slack=30, attention=attention) for _ in range(2))
    tokens = random_tokens(rng, 120)
    for each in (llm, alone):
        each.eval(tokens)
    llm.text.cache.mark()
    for size in (1, 3, 9):
        llm.eval(random_tokens(rng, size))
    assert llm.kv.compactions == alone.kv.compactions > 0
    assert llm.text.remove_tail(120)
    assert_same_future(llm, alone, random_tokens(rng, 60))


def test_a_removed_last_batch_leaves_no_trace(path: Path, rng: np.random.Generator) -> None:
    llm, alone = (recall_llama(path, slack=30) for _ in range(2))
    tokens = random_tokens(rng, 120)
    for each in (llm, alone):
        each.eval(tokens)
    for _ in range(3):
        llm.eval(random_tokens(rng, 5))
        assert llm.text.remove_tail(120)
    assert_same_future(llm, alone, random_tokens(rng, 60))


def test_clearing_empties_the_archive(path: Path, rng: np.random.Generator) -> None:
    llm = recall_llama(path)
    llm.eval(random_tokens(rng, 200))
    assert llm.kv.archived > 0
    assert llm.text.cache.found(200).any()
    llm.reset()
    kv = llm.kv
    assert (kv.used, kv.archived, kv.bytes_archive, kv.n_looked, kv.found_share) == (0, 0, 0, 0, 0)
    assert not llm.text.cache.found(200).any()
    assert llm.recalled() == []


def test_an_exact_prefill_keeps_the_archive(path: Path, rng: np.random.Generator) -> None:
    """Rows archived earlier can be retrieved during and after it."""
    settings = {"prefill": "exact", "slack": 80, "recall_type": "f32", **EXACT_ROWS}
    llm, alone = (recall_llama(path, **settings) for _ in range(2))
    tokens = random_tokens(rng, 300)
    for each in (llm, alone):
        each.eval(tokens[:200])
    n_archived = llm.kv.archived
    assert n_archived > 0
    llm.text.cache.enlarge(1000)
    assert llm.kv.archived == n_archived
    llm.text.cache.shrink()
    assert llm.kv.archived == n_archived
    for each in (llm, alone):
        each.eval(tokens[200:240])
    np.testing.assert_allclose(llm.scores[200:240], alone.scores[200:240], atol=1e-4, rtol=0)
    llm.text.cache.reset_found()
    llm.eval(random_tokens(rng, 400))
    assert llm.kv.archived == llm.n_tokens - RECENT
    assert llm.text.cache.found(n_archived).any()


@pytest.mark.parametrize("attention", ["auto", "ops"])
def test_an_exact_prefill_archives_the_prompt(
    path: Path, rng: np.random.Generator, attention: str
) -> None:
    """Compared with the reference, which reads it with as much slack."""
    tokens, more = random_tokens(rng, 300), random_tokens(rng, SLACK)
    reference = ReferenceLlama.from_gguf(
        path,
        heavy=HEAVY,
        recent=RECENT,
        slack=300 - HEAVY - RECENT,
        recall=300,  # all of them, so that no choice is close
        archive_rounding=as_float16,
        policy="streaming",
    )
    expected = read(reference, tokens)
    reference.compact()
    llm = recall_llama(
        path,
        prefill="exact",
        attention=attention,
        flash_attn=attention == "auto",
        n_ctx=400,
        hh=HEAVY + 300,
        recall=300,
        recall_type="f16",
        policy="streaming",
        **EXACT_ROWS,
    )
    llm.eval(tokens)
    np.testing.assert_allclose(llm.scores[:300], expected, atol=2e-4, rtol=0)
    assert llm.kv.found_share == 0
    llm.eval(more)
    np.testing.assert_allclose(llm.scores[300:312], read(reference, more), atol=1e-3, rtol=0)
    assert llm.kv.found_share == pytest.approx(reference.found_share, abs=1e-5) != 0
