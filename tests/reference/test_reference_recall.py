"""Recall in the NumPy reference: what it chooses, shows and drops, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o.reference import LayerCache, ReferenceLlama
from pyh2o.reference.layers import Rope
from recalling import EXACT, HEADS, N_HEAD, N_HEAD_KV, N_LAYER, random_tokens, recalling
from tiny_gguf import write_tiny_gguf

FloatArray = npt.NDArray[np.floating[Any]]


@pytest.fixture
def tiny(tmp_path: Path, seed: int) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed)


def held(model: ReferenceLlama, layer: int, head: int) -> set[int]:
    return set(model.positions(layer, head).tolist())


def taken(model: ReferenceLlama, layer: int, head: int) -> list[int]:
    taken_by_head: list[int] = model.recalled.positions[layer, head].tolist()
    return taken_by_head


# ---- with all of it back, nothing is forgotten ----


@pytest.mark.parametrize("slack", [1, 7])
@pytest.mark.parametrize("n_head_kv", [2, 4])
def test_with_everything_recalled_it_is_the_full_cache(
    tmp_path: Path, seed: int, rng: np.random.Generator, slack: int, n_head_kv: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed, n_head_kv=n_head_kv)
    tokens = random_tokens(rng, 150)
    full = ReferenceLlama.from_gguf(path, dtype=np.float64, cache_dtype=np.float64)
    expected = full.eval(tokens)
    model = recalling(path, slack=slack)

    for start in range(0, 150, slack):
        if model.n_tokens + slack > 40:
            model.compact()
            model.recall(1000)
            assert model.n_recalled == max(0, model.n_tokens - 40)
            assert model.n_rows == min(40, model.n_tokens)
        chunk = tokens[start : start + slack]
        np.testing.assert_allclose(
            model.eval(chunk), expected[start : start + slack], atol=EXACT, rtol=0
        )
    kept = {tuple(model.positions(layer, head)) for layer, head in HEADS}
    assert len(kept) > 1, "heads that hold the same rows show little"
    assert model.recalled.missed_mass == pytest.approx(0, abs=1e-15)


def test_hiding_and_dropping_agree(tiny: Path, rng: np.random.Generator) -> None:
    dropping, masking = (recalling(tiny, slack=8, keep_all=keep) for keep in (False, True))
    for n_rows in (0, 12, 3, 40, 0, 25, 7):
        tokens = random_tokens(rng, 30)
        np.testing.assert_allclose(dropping.eval(tokens), masking.eval(tokens), atol=EXACT)
        for model in (dropping, masking):
            model.recall(n_rows)
        np.testing.assert_array_equal(dropping.recalled.positions, masking.recalled.positions)
        np.testing.assert_allclose(dropping.recalled.weights, masking.recalled.weights)
    assert dropping.n_recalled == 7


def test_recalled_rows_change_the_answer_until_they_are_dropped(
    tiny: Path, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, 120)
    with_rows, without, dropped = (recalling(tiny, slack=16) for _ in range(3))
    for model in (with_rows, without, dropped):
        model.eval(tokens[:110])
        assert model.n_recalled == 0
    with_rows.recall(20)
    dropped.recall(20)
    dropped.recall(0)

    assert (with_rows.n_recalled, dropped.n_recalled) == (20, 0)
    expected = without.eval(tokens[110:])
    np.testing.assert_array_equal(dropped.eval(tokens[110:]), expected)
    assert (np.abs(with_rows.eval(tokens[110:]) - expected).max(axis=1) > 1e-3).all()


# ---- the choice ----


def naive_masses(shown: ReferenceLlama, asking: list[int]) -> FloatArray:
    """[n_layer, n_head, n_archived] mass of each row, one query and one key at a time.

    Args:
        shown: a model that has kept all keys, so they need not come from an archive.
        asking: the queries that do, of those remembered.
    """
    caches, rope = shown._caches, Rope(shown.weights)
    assert caches[0].archive is not None
    n_archived = caches[0].archive.n_positions
    masses = np.zeros((N_LAYER, N_HEAD, n_archived))
    for layer, cache in enumerate(caches):
        assert cache.archive is not None
        last = cache.archive.queries
        for head in range(N_HEAD):
            group = head // (N_HEAD // N_HEAD_KV)
            rows = held(shown, layer, group)
            turns = np.zeros(shown.n_tokens, dtype=np.int64)
            for p in set(range(n_archived)) - rows:
                place = max(p // 64 * 64 - shown._shift, 0) + p % 64
                turns[p] = place - cache.rotary_positions[group, p]
            for i in asking:
                query, at = last.rotated[head, i], int(last.positions[i])
                seen = [p for p in range(at + 1) if p in rows or p < n_archived]
                keys = rope.rotate(cache.keys[group, seen][None], turns[seen])[0]
                paid = np.exp(keys @ query / np.sqrt(query.size))
                paid /= paid.sum() * len(asking)
                for position, share in zip(seen, paid, strict=True):
                    if position not in rows:
                        masses[layer, head, position] += share
    return masses


@pytest.mark.parametrize(
    ("n_asking", "n_pos"), [(1, None), (5, None), (16, None), (24, None), (24, 100)]
)
def test_the_question_is_asked_of_hidden_and_resident_rows(
    tiny: Path, rng: np.random.Generator, n_asking: int, n_pos: int | None
) -> None:
    model = recalling(tiny, recent=24, recall_queries=24, slack=8, keep_all=True, n_pos=n_pos)
    model.eval(random_tokens(rng, 150))
    assert (model.n_rebases > 0) == (n_pos is not None)

    model.recall(20, n_asking)

    # two of every three where 24 tokens ask with 16 queries
    back = [i for i in range(n_asking) if n_asking <= 16 or i % 3 < 2]
    masses = naive_masses(model, [23 - i for i in back])
    n_blocks = -(-masses.shape[2] // 16)
    by_block = np.stack([masses[..., 16 * b : 16 * b + 16].sum(axis=2) for b in range(n_blocks)])
    weights = (by_block**2).sum(axis=(1, 2))
    np.testing.assert_allclose(model.recalled.weights, weights, rtol=EXACT)
    hidden_mass = masses.sum() / (N_LAYER * N_HEAD)
    assert 0.01 < hidden_mass < 1
    assert model.recalled.hidden_mass == pytest.approx(hidden_mass)
    for span in model.recalled.spans:
        assert span.weight == pytest.approx(weights[span.start // 16 : -(-span.end // 16)].sum())

    missed = 0.0
    for layer in range(N_LAYER):
        for head in range(N_HEAD):
            kv_head = head // 2
            rows, mine = held(model, layer, kv_head), taken(model, layer, kv_head)
            for block in range(n_blocks):
                end = min(masses.shape[2], 16 * block + 16)
                hidden = [p for p in range(16 * block, end) if p not in rows]
                if hidden:
                    left = 1 - len(np.intersect1d(hidden, mine)) / len(hidden)
                    missed += by_block[block, layer, head] * left / (N_LAYER * N_HEAD)
    assert model.recalled.missed_mass == pytest.approx(missed)
    assert 0 < missed < hidden_mass


@pytest.mark.parametrize("n_rows", [1, 20, 64, 1000])
def test_a_head_takes_what_it_does_not_hold(
    tiny: Path, rng: np.random.Generator, n_rows: int
) -> None:
    model = recalling(tiny, slack=8)
    model.eval(random_tokens(rng, 200))
    assert model.n_rows == 48

    model.recall(n_rows)

    # The compaction before tokens 192 .. 199 saw 191 as the newest; of 176 archived rows 24 stayed.
    assert model.n_recalled == min(n_rows, 152)
    in_spans = {p for span in model.recalled.spans for p in range(span.start, span.end)}
    for layer, head in HEADS:
        mine = taken(model, layer, head)
        assert mine == sorted(set(mine))
        assert len(mine) == model.n_recalled
        assert not held(model, layer, head) & set(mine)
        assert in_spans.issuperset(mine)
    np.testing.assert_array_equal(model.recalled.places, model.recalled.positions)
    ends = [0] + [end for span in model.recalled.spans for end in (span.start, span.end)]
    assert ends == sorted(ends)
    assert ends[-1] <= 176


def test_what_is_recalled_is_still_hidden(tiny: Path, rng: np.random.Generator) -> None:
    """The same question finds the same, whatever it finds shown."""
    model = recalling(tiny, slack=8)
    model.eval(random_tokens(rng, 150))
    model.recall(20)
    before = model.recalled
    model.recall(20)
    np.testing.assert_array_equal(model.recalled.positions, before.positions)
    np.testing.assert_array_equal(model.recalled.weights, before.weights)
    assert model.recalled.missed_mass == before.missed_mass


def test_nothing_hidden_nothing_recalled(tiny: Path, rng: np.random.Generator) -> None:
    model = recalling(tiny, slack=8)
    model.recall(20)
    assert model.n_recalled == 0
    model.eval(random_tokens(rng, 35))
    model.recall(20)
    assert (model.n_recalled, model.recalled.hidden_mass) == (0, 0)
    # All that is archived is still held by every head.
    model.compact()
    model.recall(20)
    assert (model.n_recalled, model.recalled.hidden_mass) == (0, 0)
    assert model.recalled.weights.tolist() == [0, 0]
    model.eval(random_tokens(rng, 14))
    # Only 43 tokens were there at the compaction that followed.
    model.recall(20)
    assert model.n_recalled == 3


# ---- what else looks at attention ----


def test_scores_of_recalled_rows_are_dropped(tiny: Path, rng: np.random.Generator) -> None:
    """A query gives the rows in use what it does not give to those recalled."""
    model = recalling(tiny, slack=16)
    model.eval(random_tokens(rng, 97), ubatch=1)
    model.recall(30)
    before = {pair: model.scores(*pair) for pair in HEADS}
    model.eval(random_tokens(rng, 1))
    for pair in HEADS:
        growth = model.scores(*pair).sum() - before[pair].sum()
        assert model.scores(*pair).size == before[pair].size + 1
        assert 0 < growth < 1 - 1e-6


def test_last_queries_of_a_policy_see_recalled_rows(rng: np.random.Generator) -> None:
    """Their share is lacking; rows in use have the same proportions."""
    cache = LayerCache(2, 8, cache_dtype=np.float64, score_dtype=np.float64, n_queries=3)
    keys, values = rng.standard_normal((2, 2, 20, 8))
    positions = np.arange(20)
    cache.append(keys, values, positions)
    cache.remember_queries(rng.standard_normal((4, 20, 8)), positions, positions)
    alone = cache.query_attention()

    recalled = rng.standard_normal((2, 5, 8))
    cache.show(recalled, recalled)

    beside = cache.query_attention()
    assert beside.shape == alone.shape == (2, 3, 20)
    expected = np.zeros_like(alone)
    for head in range(2):
        for i, query in enumerate(cache.queries.rotated.reshape(2, 2, 3, 8)[head].swapaxes(0, 1)):
            for member in query:
                seen = np.concatenate([keys[head, : 18 + i], recalled[head]])
                paid = np.exp(seen @ member / np.sqrt(8))
                expected[head, i, : 18 + i] += (paid / paid.sum())[: 18 + i] / 2
    np.testing.assert_allclose(beside, expected, atol=1e-12)


@pytest.mark.parametrize("policy", ["tova", "snap", "h2o-far", "expected"])
def test_a_policy_has_queries_of_its_own(tiny: Path, rng: np.random.Generator, policy: str) -> None:
    """What recall remembers does not change what the policy keeps, nor the other way round."""
    tokens = random_tokens(rng, 150)
    alone, both, fewer = (
        recalling(tiny, slack=8, policy=policy, recall_queries=n_queries)
        for n_queries in (0, 16, 4)
    )
    expected = alone.eval(tokens)
    np.testing.assert_array_equal(both.eval(tokens), expected)
    np.testing.assert_array_equal(fewer.eval(tokens), expected)

    both.recall(20, 4)
    fewer.recall(20)
    np.testing.assert_array_equal(both.recalled.positions, fewer.recalled.positions)
    np.testing.assert_array_equal(both.recalled.weights, fewer.recalled.weights)
    both.recall(20)
    assert not np.array_equal(both.recalled.weights, fewer.recalled.weights)


def test_no_query_older_than_the_recent_rows_asks(tiny: Path, rng: np.random.Generator) -> None:
    """It would have archived rows in its future."""
    model = recalling(tiny, heavy=24, recent=5, slack=8)
    model.eval(random_tokens(rng, 100))
    archive = model._caches[0].archive
    assert archive is not None
    assert archive.queries.positions.tolist() == [95, 96, 97, 98, 99]
    assert archive.n_positions <= 95


# ---- the text is taken back, or forgotten ----


def test_a_tail_is_read_again_with_what_it_asked_for(tiny: Path, rng: np.random.Generator) -> None:
    """Recalled rows stay when the tail goes, and its queries go with it."""
    tokens = random_tokens(rng, 112)
    model, other = recalling(tiny, slack=30), recalling(tiny, slack=30)
    for one in (model, other):
        one.eval(tokens[:106])
    model.eval(tokens[106:])
    model.recall(20)
    recalled = model.recalled
    model.remove(106)

    archive = model._caches[0].archive
    assert archive is not None
    assert archive.queries.positions.tolist() == list(range(96, 106))
    assert model.recalled is recalled
    assert model._caches[0].recalled_keys.shape[1] == model.n_recalled == 20
    again = model.eval(tokens[106:])
    assert archive.queries.positions.tolist() == list(range(96, 112))
    other.eval(tokens[106:])
    other.recall(20)
    np.testing.assert_array_equal(other.recalled.positions, recalled.positions)
    other.remove(106)
    np.testing.assert_array_equal(other.eval(tokens[106:]), again)


def test_a_tail_without_queries_asks_nothing(tiny: Path, rng: np.random.Generator) -> None:
    """All that were remembered are taken back; the archive stays, and answers the next text."""
    model = recalling(tiny, heavy=24, recent=30, recall_queries=4, slack=8)
    model.eval(random_tokens(rng, 120))
    archive = model._caches[0].archive
    assert archive is not None
    n_archived = archive.n_positions
    model.remove(115)
    model.recall(20)
    assert model.n_recalled == 0
    model.eval(random_tokens(rng, 2))
    model.recall(20)
    assert model.n_recalled == 20
    assert archive.n_positions == n_archived


def test_forgetting_the_text_empties_the_archive(tiny: Path, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 100)
    model = recalling(tiny, slack=8, n_pos=80)
    first = model.eval(tokens)
    model.recall(20)
    spans = model.recalled.spans
    model.reset()

    assert (model.n_recalled, model.recalled.spans) == (0, ())
    archive = model._caches[0].archive
    assert archive is not None
    assert (archive.n_positions, archive.queries.positions.size) == (0, 0)
    np.testing.assert_array_equal(model.eval(tokens), first)
    model.recall(20)
    assert model.recalled.spans == spans


# ---- refusals ----


def test_without_an_archive_nothing_can_be_recalled(tiny: Path, rng: np.random.Generator) -> None:
    full = ReferenceLlama.from_gguf(tiny, recall_queries=16)
    off = ReferenceLlama.from_gguf(tiny, heavy=10, recent=10)
    for model in (full, off):
        model.eval(random_tokens(rng, 40))
        assert model.n_recalled == 0
        with pytest.raises(ValueError, match="recall_queries"):
            model.recall(20)


def test_counts_are_checked(tiny: Path) -> None:
    model = recalling(tiny)
    for counts in ((-1, 16), (20, 0)):
        with pytest.raises(ValueError, match="need >= 0 and >= 1"):
            model.recall(*counts)
