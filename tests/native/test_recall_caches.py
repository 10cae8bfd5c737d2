"""Recall in every kind of cache and archive, in limits, and in the company of other streams."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import clear_steps, read
from pyh2o import Llama
from pyh2o.cache.kv_cache import KVCache
from pyh2o.errors import NativeError
from pyh2o.reference import ReferenceLlama, as_float16, as_float32
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, stored_as, tiny_parent, told_to_recall

N_VOCAB = 384
HEAVY, RECENT, SLACK, RECALL = 24, 20, 12, 30


def recalling_llama(path: Path, **settings: Any) -> Llama:
    values: dict[str, Any] = {
        "hh": HEAVY,
        "recent": RECENT,
        "slack": SLACK,
        "recall": RECALL,
        "n_ctx": 128,
        "logits_all": True,
    }
    return told_to_recall(path, **{**values, **settings})


def cache_of(llm: Llama) -> KVCache:
    return KVCache(int(ctypes.cast(llm.ctx, ctypes.c_void_p).value or 0))


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    tokens: list[int] = rng.integers(0, N_VOCAB, n).tolist()
    return tokens


def logits_of(llm: Llama, tokens: list[int]) -> np.ndarray:
    llm.eval(tokens)
    return llm.scores[llm.n_tokens - len(tokens) : llm.n_tokens].copy()


def relative_error(mine: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(mine - exact).mean() / np.abs(exact).mean())


# -------------------------------------------------------------------------------------------------
# Types, layouts, heads
# -------------------------------------------------------------------------------------------------

# Relative errors of logits, of a cache and of an archive of a type.
ROUNDING = {"f32": 1e-4, "f16": 0.01, "q8_0": 0.06, "q4_0": 0.6}


@pytest.mark.parametrize("n_pos", [4096, 160], ids=["original", "re-based"])
@pytest.mark.parametrize(
    ("kv_type", "archive_type"),
    [
        ("f32", "f32"),
        ("f32", "f16"),
        ("f32", "q8_0"),
        ("f32", "q4_0"),
        ("f16", "f16"),
        ("q8_0", "q8_0"),
        ("q4_0", "q4_0"),
    ],
)
def test_rounded_rows_are_recalled(
    tmp_path: Path, rng: np.random.Generator, kv_type: str, archive_type: str, n_pos: int
) -> None:
    """Against rows as they are: heads of 64 elements, which quantised caches mix.

    The policy keeps the newest rows, so rounding cannot choose others; what is recalled is nearly
    all that is hidden, so it hardly can there.
    """
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, head_size=64, n_ctx_train=n_pos)
    settings: dict[str, Any] = {"policy": "streaming", "hh": 8, "pinned": 8, "recall": 64}
    rounded = recalling_llama(
        path, recall_type=archive_type, **stored_as(kv_type), flash_attn=True, **settings
    )
    exact = recalling_llama(path, recall_type="f32", flash_attn=True, **EXACT_ROWS, **settings)
    without = recalling_llama(path, recall_type="f32", flash_attn=True, **EXACT_ROWS, **settings)
    n_read = 96 if n_pos > 160 else 192
    tokens, more = random_tokens(rng, n_read), random_tokens(rng, 40)
    for llm in (rounded, exact, without):
        llm.eval(tokens)
    n_recall = rounded.kv.archived - 16 if n_pos > 160 else 64
    for llm in (rounded, exact):
        cache_of(llm).recall(n_recall)
    assert rounded.kv.recalled == exact.kv.recalled > 0
    assert rounded.kv.hidden_mass == pytest.approx(exact.kv.hidden_mass, abs=0.1)
    if [span[:2] for span in cache_of(rounded).recalled()] != [
        span[:2] for span in cache_of(exact).recalled()
    ]:
        assert archive_type == "q4_0" or n_pos == 160
        return
    expected = logits_of(exact, more)
    limit = max(ROUNDING[kv_type], ROUNDING[archive_type])
    assert relative_error(logits_of(rounded, more), expected) < limit
    # the rows that were recalled matter
    assert relative_error(logits_of(without, more), expected) > 0.01


@pytest.mark.parametrize("archive_type", ["f16", "q8_0"])
def test_what_is_in_the_archive_is_rounded_once(
    tmp_path: Path, rng: np.random.Generator, archive_type: str
) -> None:
    """A row of the cache's type comes back as it was, so the spans of a state say the same."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    llm = recalling_llama(path, recall_type=archive_type, **stored_as(archive_type))
    other = recalling_llama(path, recall_type="f32", **stored_as(archive_type))
    tokens = random_tokens(rng, 100)
    for each in (llm, other):
        each.eval(tokens)
        cache_of(each).recall(RECALL)
    assert cache_of(llm).recalled() == cache_of(other).recalled()
    more = random_tokens(rng, 8)
    np.testing.assert_array_equal(logits_of(llm, more), logits_of(other, more))


@pytest.mark.parametrize(
    ("head_size", "attention"), [(18, "ops"), (20, "ops"), (24, "auto"), (32, "auto")]
)
def test_heads_of_any_size(
    tmp_path: Path, rng: np.random.Generator, head_size: int, attention: str
) -> None:
    """No vector is as short as a head of 18 elements: it crashed."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, head_size=head_size, n_ctx_train=160)
    reference = ReferenceLlama.from_gguf(
        path,
        heavy=HEAVY,
        recent=RECENT,
        slack=SLACK,
        recall_queries=32,
        n_pos=160,
        archive_rounding=as_float32,
    )
    recalls = [0, 0, 0, 0, 0, 0, RECALL, -1, -1, 8, -1, -1, -1, -1, RECALL, -1, -1]
    steps, _ = clear_steps(reference, rng, [SLACK] * len(recalls), recall=recalls)
    llm = recalling_llama(
        path,
        attention=attention,
        flash_attn=attention != "ops",
        recall_type="f32",
        **EXACT_ROWS,
    )
    for step, n_rows in zip(steps, recalls, strict=True):
        np.testing.assert_allclose(logits_of(llm, step.tokens), step.logits, atol=1e-4, rtol=0)
        if n_rows >= 0:
            cache_of(llm).recall(n_rows)
        mine = [span[:2] for span in cache_of(llm).recalled()]
        assert mine == [(span.start, span.end) for span in step.recalled.spans]
    assert llm.kv.rebases > 0


def test_archived_rows_are_those_of_the_reference(tmp_path: Path, rng: np.random.Generator) -> None:
    """With V in the layout without flash attention, and rows of the archive's default type."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    reference = ReferenceLlama.from_gguf(
        path,
        heavy=HEAVY,
        recent=RECENT,
        slack=SLACK,
        recall_queries=32,
        archive_rounding=as_float16,
    )
    recalls = [-1, -1, -1, -1, -1, -1, RECALL, -1, -1]
    steps, _ = clear_steps(reference, rng, [SLACK] * len(recalls), recall=recalls)
    llm = recalling_llama(path, attention="ops", flash_attn=False, recall_type="q8_0", **EXACT_ROWS)
    for step, n_rows in zip(steps, recalls, strict=True):
        mine = logits_of(llm, step.tokens)
        assert relative_error(mine, step.logits) < (0.02 if llm.kv.recalled else 1e-4)
        if n_rows >= 0:
            cache_of(llm).recall(n_rows)
    assert llm.kv.recalled == RECALL


@pytest.mark.parametrize("attention", ["ops", "auto"])
def test_with_everything_recalled_nothing_is_missing(
    tmp_path: Path, rng: np.random.Generator, attention: str
) -> None:
    """The logits are those of the full cache."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    settings: dict[str, Any] = {"recall": 200, "recall_type": "f32", "slack": 100, **EXACT_ROWS}
    llm = recalling_llama(path, attention=attention, flash_attn=attention != "ops", **settings)
    full = tiny_parent(path, n_ctx=512, logits_all=True, flash_attn=False, **EXACT_ROWS)
    tokens, more = random_tokens(rng, 144), random_tokens(rng, 40)
    llm.eval(tokens)
    assert llm.kv.compactions == 0
    llm.eval(more[:1])  # for which rows go: it does not see them, and is read again
    assert llm.kv.compactions == 1
    cache_of(llm).recall(200)
    kv = llm.kv
    assert kv.recalled == kv.position - kv.used == 100
    assert kv.missed_mass == pytest.approx(0, abs=1e-6)
    assert llm.remove_tail(144)
    full.eval(tokens + more)
    np.testing.assert_allclose(logits_of(llm, more), full.scores[144:184], atol=2e-4, rtol=0)


# -------------------------------------------------------------------------------------------------
# Limits
# -------------------------------------------------------------------------------------------------


def test_memory_and_cells_do_not_grow(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=160)
    llm = recalling_llama(path)
    llm._holds_recalled = False  # now and then, as a text goes on
    sizes = set()
    for _ in range(60):
        llm.eval(random_tokens(rng, int(rng.integers(1, 30))))
        kv = llm.kv
        assert kv.used <= kv.capacity
        assert kv.recalled <= RECALL
        assert kv.capacity + RECALL <= kv.cells
        sizes.add((kv.bytes_k, kv.bytes_v, kv.bytes_scores, kv.cells))
    assert len(sizes) == 1
    assert llm.kv.recalls > 5
    assert llm.kv.rebases > 3
    # all that was there at the last compaction but for the recent rows, which are not to be removed
    assert not llm.can_remove_tail(llm.kv.archived)
    assert llm.can_remove_tail(llm.kv.archived + 1)


def test_without_recall_there_is_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    """No archive, and no queries are kept; the text is bit for bit that without the code."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    plain = recalling_llama(path, recall=0)
    llm = recalling_llama(path)
    tokens = random_tokens(rng, 150)
    np.testing.assert_array_equal(logits_of(plain, tokens), logits_of(llm, tokens))
    none, some = plain.kv, llm.kv
    n_ring = 3 * 4 * 20 * 32 * 4  # layers, heads, recent queries, elements, bytes
    assert some.bytes_scores - none.bytes_scores == n_ring
    assert (none.archived, none.bytes_archive, none.recalls, none.archive_seconds) == (0, 0, 0, 0)
    assert some.archived > 0
    assert some.bytes_archive > 0
    with pytest.raises(NativeError, match="there is no archive"):
        cache_of(plain).recall(5)
    with pytest.raises(NativeError, match="there is no archive"):
        cache_of(plain).recalled()


def test_an_archive_of_limited_size(tmp_path: Path, rng: np.random.Generator) -> None:
    """The oldest pages go, and are counted; rows of theirs that were recalled go with them."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=8, n_ctx_train=160)
    llm = recalling_llama(path, recall_mib=1, recall_type="f32", logits_all=False)
    for _ in range(40):
        llm.eval(random_tokens(rng, 60))
        cache_of(llm).recall(RECALL)
        kv = llm.kv
        assert 0 < kv.bytes_archive <= 2**20
        assert llm.can_remove_tail(kv.archived + kv.unarchived + 1)
        spans = cache_of(llm).recalled()
        assert all(start >= kv.unarchived for start, _, _ in spans)
        llm.eval(random_tokens(rng, 5))
        state = llm.kv_state()
        llm.load_kv_state(state, llm.input_ids[: llm.n_tokens].copy())
        llm._holds_recalled = True
        assert llm.kv_state() == state
    assert llm.kv.unarchived > 0
    assert llm.kv.rebases > 3


def test_recalled_rows_whose_page_leaves_the_archive(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A re-base could not place them anew, and a state of them was refused."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=8, n_ctx_train=160)
    llm = recalling_llama(path, recall_mib=1, recall_type="f32", logits_all=False)
    alone = recalling_llama(path, recall_mib=1, recall_type="f32", logits_all=False)
    while llm.kv.unarchived == 0:
        llm.eval(random_tokens(rng, 20))
    llm.reset()
    tokens = random_tokens(rng, 100)
    for each in (llm, alone):
        each.eval(tokens)
    cache_of(llm).recall(RECALL)
    assert llm.kv.recalled == RECALL
    first = cache_of(llm).recalled()[0][0]
    while llm.kv.unarchived <= first:
        more = random_tokens(rng, 20)
        for each in (llm, alone):
            each.eval(more)
            state = each.kv_state()
            each.load_kv_state(state, each.input_ids[: each.n_tokens].copy())
            each._holds_recalled = True
    assert llm.kv.recalled == 0
    assert cache_of(llm).recalled() == []
    # rows that take the cells of recalled ones begin without scores
    for layer in range(8):
        assert llm.kv_rows(layer)[1].max() < alone.kv_rows(layer)[1].max() * 3


# -------------------------------------------------------------------------------------------------
# Marks, clearing, exact prefill
# -------------------------------------------------------------------------------------------------


def test_back_to_a_mark_under_recalled_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    """The tail leaves no trace, and what is recalled stays."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    llm, alone = (recalling_llama(path, slack=30) for _ in range(2))
    tokens = random_tokens(rng, 100)
    for each in (llm, alone):
        each.eval(tokens)
        cache_of(each).recall(RECALL)
        assert each.kv.recalled == RECALL
    cache_of(llm).mark()
    spans = cache_of(llm).recalled()
    llm.eval(random_tokens(rng, llm.room_in_batch()))
    assert llm.remove_tail(100)
    assert cache_of(llm).recalled() == spans
    more = random_tokens(rng, 60)
    np.testing.assert_array_equal(logits_of(llm, more), logits_of(alone, more))
    for layer in range(3):
        for mine, others in zip(llm.kv_rows(layer), alone.kv_rows(layer), strict=True):
            np.testing.assert_array_equal(mine, others)


def test_a_mark_from_before_the_recall(tmp_path: Path, rng: np.random.Generator) -> None:
    """A turn: read, ask, go back, read again under what came."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    llm, alone = (recalling_llama(path, slack=30) for _ in range(2))
    tokens, tail = random_tokens(rng, 84), random_tokens(rng, 12)
    for each in (llm, alone):
        each.eval(tokens)
        cache_of(each).mark()
        each.eval(tail)
        cache_of(each).recall(RECALL)
        assert each.kv.compactions == 1
        assert each.remove_tail(84)
    llm.eval(random_tokens(rng, 5))
    assert llm.remove_tail(84)
    more = random_tokens(rng, 60)
    np.testing.assert_array_equal(logits_of(llm, more), logits_of(alone, more))


def test_recalled_rows_leave_when_they_are_dropped(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    llm, alone = (recalling_llama(path, **EXACT_ROWS) for _ in range(2))
    tokens = random_tokens(rng, 100)
    for each in (llm, alone):
        each.eval(tokens)
    cache_of(llm).recall(RECALL)
    cache_of(llm).drop_recalled()
    assert llm.kv.recalled == 0
    assert cache_of(llm).recalled() == []
    more = random_tokens(rng, 40)
    np.testing.assert_allclose(logits_of(llm, more), logits_of(alone, more), atol=1e-5, rtol=0)


def test_clearing_empties_the_archive(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    llm, fresh = (recalling_llama(path) for _ in range(2))
    llm.eval(random_tokens(rng, 200))
    cache_of(llm).recall(RECALL)
    llm.reset()
    llm._holds_recalled = True
    kv = llm.kv
    assert (kv.used, kv.recalled, kv.archived, kv.bytes_archive) == (0, 0, 0, 0)
    assert cache_of(llm).recall(RECALL) == 0  # there is nobody to ask
    tokens = random_tokens(rng, 90)
    for each in (llm, fresh):
        each.eval(tokens)
        cache_of(each).recall(RECALL)
    assert cache_of(llm).recalled() == cache_of(fresh).recalled() != []
    more = random_tokens(rng, 20)
    np.testing.assert_array_equal(logits_of(llm, more), logits_of(fresh, more))


def test_an_exact_prefill_keeps_the_archive(tmp_path: Path, rng: np.random.Generator) -> None:
    """What was recalled is dropped; what was archived before can be recalled after it."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    llm = recalling_llama(path, prefill="exact", slack=80, recall_type="f32", **EXACT_ROWS)
    llm.eval(random_tokens(rng, 100))
    llm.eval(random_tokens(rng, 60))
    n_archived = llm.kv.archived
    cache_of(llm).recall(RECALL)
    assert llm.kv.recalled == RECALL
    cache = cache_of(llm)
    cache.enlarge(1000)
    kv = llm.kv
    assert (kv.recalled, kv.archived) == (0, n_archived)
    assert cache.recalled() == []
    with pytest.raises(NativeError, match="enlarged"):
        cache.recall(RECALL)
    cache.shrink()
    assert llm.kv.archived == n_archived
    llm.eval(random_tokens(rng, 400))
    assert llm.kv.archived == llm.n_tokens - RECENT
    assert cache_of(llm).recall(RECALL) == RECALL
    assert np.isfinite(logits_of(llm, random_tokens(rng, 30))).all()


def test_an_exact_prefill_archives_what_was_read_in_full(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Compared with the reference that reads it with so much slack."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    tokens = random_tokens(rng, 300)
    reference = ReferenceLlama.from_gguf(
        path,
        heavy=HEAVY,
        recent=RECENT,
        slack=300 - HEAVY - RECENT,
        recall_queries=32,
        archive_rounding=as_float16,
        policy="streaming",
    )
    reference.eval(tokens)
    reference.compact()
    reference.recall(RECALL)
    llm = recalling_llama(
        path, prefill="exact", recall_type="f16", policy="streaming", **EXACT_ROWS
    )
    llm.eval(tokens)
    cache_of(llm).recall(RECALL)
    assert llm.kv.hidden_mass == pytest.approx(reference.recalled.hidden_mass, abs=1e-4)
    if reference.recalled.margin > 1e-4:
        mine = [span[:2] for span in cache_of(llm).recalled()]
        assert mine == [(span.start, span.end) for span in reference.recalled.spans]
        more = random_tokens(rng, 12)
        np.testing.assert_allclose(logits_of(llm, more), read(reference, more), atol=1e-3, rtol=0)
