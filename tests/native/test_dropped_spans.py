"""Dropped spans: the native cache equals the NumPy reference, and other rows stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import assert_same_steps, clear_steps, read
from pyh2o import Llama
from pyh2o.cache.kv_cache import KVCache
from pyh2o.errors import SettingsError
from research.reference import ReferenceLlama
from some_policies import in_research
from tiny_gguf import write_tiny_gguf
from tiny_llama import (
    EXACT_ROWS,
    assert_same_cache,
    assert_same_future,
    random_tokens,
    stored_as,
    tiny_llama,
)

HEAVY, RECENT, SLACK = 12, 9, 7
POLICIES = (
    *("h2o", "h2o-mean", "h2o-decay:half_life=20", "h2o-far:near=4,half_life=20", "roco"),
    *("streaming", "snap:queries=5,pool=3", in_research("keydiff:KeyDiff")),
    *map(in_research, ("one_choice:H2OLayer", "one_choice:H2OCells")),
)

# Before any eviction; partly evicted and partly in cells shared by heads; recent; two adjacent
# spans; older than another span; and a removed tail between them.
STEPS: list[int | tuple[int, int]] = [
    *(7, 7, (4, 9), 7, 7),
    *(7, 7, 7, (12, 44), 7, -2, 5),
    *((48, 52), 7, (53, 57), 7, 7, 7, 7),
    *((60, 85), (44, 48), -1, 7, 7, 7, 7, 7),
]


def llama_of(path: Path, **settings: Any) -> Llama:
    values = {"hh": HEAVY, "recent": RECENT, "slack": SLACK, "n_ctx": 200}
    llm = tiny_llama(path, logits_all=True, **{**values, **settings})
    llm.text.cache.mark = lambda: None  # type: ignore[method-assign]  # the reference has no marks
    return llm


def reference_of(path: Path, policy: str = "h2o", **settings: Any) -> ReferenceLlama:
    return ReferenceLlama.from_gguf(
        path, heavy=HEAVY, recent=RECENT, slack=SLACK, policy=policy, **settings
    )


def held_by(llm: Llama) -> list[set[int]]:
    """Return the positions of each (layer, KV head)."""
    layers = range(llm.text.n_layer)
    return [set(of_head) for layer in layers for of_head in llm.kv_rows(layer)[0].tolist()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=2, n_ctx_train=1024)


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_after_a_drop_equal_the_reference(
    path: Path, rng: np.random.Generator, policy: str
) -> None:
    steps, reference = clear_steps(reference_of(path, policy), rng, STEPS)
    with llama_of(path, policy=policy, **EXACT_ROWS) as llm:
        assert_same_steps(llm, steps)
        assert reference.eviction is not None
        assert llm.text.dropped_spans == [(4, 9), (12, 52), (53, 57), (60, 85)]
        assert llm.kv.dropped == 5 + 40 + 4 + 25


def test_drops_with_packed_rows_and_fair_spans_equal_the_reference(
    path: Path, rng: np.random.Generator
) -> None:
    n_pos = HEAVY + RECENT + SLACK
    reference = reference_of(path, n_pos=n_pos)
    reference.share_fairly([20, 50])
    steps, _ = clear_steps(reference, rng, STEPS)
    write_tiny_gguf(path, seed=3, n_layer=2, n_ctx_train=n_pos)
    with llama_of(path, **EXACT_ROWS) as llm:
        llm.share_fairly([20, 50])
        assert_same_steps(llm, steps)
        assert llm.kv.rebases > 3


def test_dropping_rows_equals_masking_them(path: Path, rng: np.random.Generator) -> None:
    logits = []
    tokens = rng.integers(0, 384, 100)
    for keep_all in (False, True):
        reference = reference_of(path, keep_all=keep_all, dtype=np.float64)
        read(reference, tokens[:60])
        reference.drop_spans([(20, 50)])
        logits.append(read(reference, tokens[60:]))
    np.testing.assert_allclose(*logits, atol=1e-9)


def test_other_rows_stay_after_a_drop(path: Path, rng: np.random.Generator) -> None:
    """However many dropped rows a head had; surplus rows are evicted at compactions."""
    with llama_of(path) as llm:
        llm.eval(random_tokens(rng, 70))
        before = held_by(llm)
        gone = set(range(20, 60))
        assert len({len(rows & gone) for rows in before}) > 1
        llm.text.drop_spans([(20, 60)])
        left = held_by(llm)
        assert [rows - gone for rows in left] == [rows - gone for rows in before]
        assert min(len(rows & gone) for rows in left) == 0 < max(len(rows & gone) for rows in left)
        # except those of recent tokens, which all heads had
        assert all(max(rows & gone, default=0) < 70 - RECENT - SLACK for rows in left)
        llm.eval(random_tokens(rng, 3 * SLACK))
        assert not any(rows & gone for rows in held_by(llm))


@pytest.mark.parametrize("recall", [0, 30])
def test_a_tail_is_removed_to_before_or_after_a_dropped_span(
    path: Path, rng: np.random.Generator, recall: int
) -> None:
    settings = {"recall": recall, "hh": HEAVY + recall}
    first, thought = random_tokens(rng, 36), random_tokens(rng, 4)
    said, more = random_tokens(rng, 2), random_tokens(rng, 60)
    with llama_of(path, **settings) as llm, llama_of(path, **settings) as alone:
        for each in (llm, alone):
            each.eval(first)
            KVCache.mark(each.text.cache)
            each.eval(thought)
            each.eval(said)
        for each in (llm, alone):
            each.text.drop_spans([(36, 40)])
        for n_tokens in (37, 40):
            assert not llm.text.can_remove_tail(n_tokens)
            assert not llm.text.remove_tail(n_tokens)
        assert_same_cache(llm, alone)
        assert llm.text.remove_tail(41)
        assert llm.text.dropped_spans == [(36, 40)]
        assert llm.text.remove_tail(36)
        assert llm.text.dropped_spans == []
        # the text had a mark there: nothing of the tail remains
        alone.reset()
        alone.eval(first)
        assert_same_future(llm, alone, more)


def test_the_archive_continues_after_a_dropped_span(path: Path, rng: np.random.Generator) -> None:
    """Rows dropped before they were archived are missing, adjacent ones are archived."""
    with llama_of(path, recall=150, hh=HEAVY + 150) as llm:
        llm.eval(random_tokens(rng, 60))
        llm.text.drop_spans([(54, 58)])
        llm.eval(random_tokens(rng, 60))
        llm.text.cache.reset_found()
        llm.eval(random_tokens(rng, 5))
        found = np.flatnonzero(llm.text.cache.found(llm.n_tokens))
        assert llm.kv.archived > 100
        assert not np.isin(np.arange(54, 58), found).any()
        assert np.isin([50, 51, 52, 53, 58, 59, 60], found).all()


@pytest.mark.parametrize(("rows", "atol"), [("f16", 0.0), ("q8_0", 1e-5)])
def test_whole_pages_of_the_archive_lose_their_rows(
    path: Path, tmp_path: Path, rows: str, atol: float
) -> None:
    """Not in a file; the text continues as it would with the rows."""
    # a re-base comes while heads still hold rows of such pages, whose cells other rows need
    write_tiny_gguf(path, seed=3, n_layer=2, n_ctx_train=202)
    settings = {"recall": 20, "hh": 60, "slack": 3, **stored_as(rows)}
    archive = tmp_path / "archive"
    with (
        llama_of(path, **settings) as llm,
        llama_of(path, recall_archive=archive, **settings) as other,
    ):
        for each in (llm, other):
            each.eval(random_tokens(np.random.default_rng(5), 600))
        before = llm.kv
        for each in (llm, other):
            each.text.drop_spans([(100, 590)])
        assert any(of_head & set(range(128, 512)) for of_head in held_by(llm))
        # three of five pages of 128 tokens contain nothing else
        assert 2 / 5 < llm.kv.bytes_archive / before.bytes_archive < 0.42
        assert other.kv.bytes_archive == before.bytes_archive
        for token in [5] * 12 + random_tokens(np.random.default_rng(6), 300):
            for each in (llm, other):
                each.eval([token])
        np.testing.assert_allclose(llm.scores[600:612], other.scores[600:612], rtol=0, atol=atol)
        if not atol:
            assert_same_cache(llm, other)
            np.testing.assert_array_equal(llm.scores[612:912], other.scores[612:912])
        assert llm.kv.rebases > before.rebases + 1


def test_spans_that_cannot_be_dropped_are_refused(path: Path) -> None:
    with llama_of(path, pinned=4) as llm:
        llm.eval(list(range(40)))
        llm.pin_spans([(8, 10)])
        rows = held_by(llm)
        for spans in ([(3, 6)], [(9, 12)], [(6, 9)], [(30, 40)], [(39, 41)], [(50, 52)]):
            with pytest.raises(SettingsError, match="pinned tokens and the newest token cannot"):
                llm.text.drop_spans(spans)
        for spans in ([(12, 12)], [(12, 14), (13, 15)], [(16, 17), (12, 13)], [(-2, 4)]):
            with pytest.raises(SettingsError, match="ascending"):
                llm.text.drop_spans(spans)
        assert held_by(llm) == rows
        assert llm.text.dropped_spans == []
        llm.text.drop_spans([])
        llm.text.drop_spans([(12, 39)])
        with pytest.raises(SettingsError, match="dropped tokens cannot be pinned"):
            llm.pin_spans([(8, 10), (20, 22)])
        llm.reset()
        assert llm.text.dropped_spans == []


def test_a_full_cache_drops_nothing(path: Path) -> None:
    with tiny_llama(path, evict=False, n_ctx=64) as llm:
        llm.eval(list(range(40)))
        llm.text.drop_spans([(10, 20)])
        assert llm.text.dropped_spans == []
        assert llm.kv.used == 40
