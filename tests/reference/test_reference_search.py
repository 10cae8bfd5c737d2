"""Search in the NumPy reference on tiny models: retrieved rows and attention to them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from research.reference import ReferenceLlama, search
from research.reference.codes import hadamard
from research.reference.layers import Rope
from tiny_gguf import write_tiny_gguf

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

EXACT = 1e-9  # float64 rounding of a difference

# Sizes of `write_tiny_gguf`.
N_LAYER, N_HEAD, N_HEAD_KV = 3, 4, 2
GROUP = N_HEAD // N_HEAD_KV
HEADS = [(layer, head) for layer in range(N_LAYER) for head in range(N_HEAD_KV)]


@pytest.fixture
def tiny(tmp_path: Path, seed: int) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed)


def n_retrieved(n_together: int) -> int:
    """Return how many of the 12 rows `n_together` tokens retrieve: a single one a quarter."""
    return min(12, 3 * n_together)


def random_tokens(rng: np.random.Generator, n_tokens: int) -> IntArray:
    return rng.integers(3, 384, n_tokens)


def recall_reference(path: Path, **settings: Any) -> ReferenceLlama:
    """Return a model in float64 without rounding; settings as in `ReferenceLlama.from_gguf`."""
    settings = {"heavy": 24, "recent": 16, "recall": 12} | settings
    return ReferenceLlama.from_gguf(
        path,
        dtype=np.float64,
        cache_dtype=np.float64,
        archive_rounding=lambda rows: rows.astype(np.float64),
        **settings,
    )


@pytest.mark.parametrize(("slack", "n_head_kv"), [(1, 2), (7, 4), (80, 1)])
def test_retrieving_all_rows_equals_the_full_cache(
    tmp_path: Path, seed: int, rng: np.random.Generator, slack: int, n_head_kv: int
) -> None:
    """Tokens one by one, a few together, and many groups."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=seed, n_head_kv=n_head_kv)
    tokens = random_tokens(rng, 200)
    full = ReferenceLlama.from_gguf(path, dtype=np.float64, cache_dtype=np.float64)
    model = recall_reference(path, slack=slack, recall=1000)
    np.testing.assert_allclose(model.eval(tokens), full.eval(tokens), atol=EXACT, rtol=0)
    heads = [(layer, head) for layer in range(N_LAYER) for head in range(n_head_kv)]
    for layer, head in heads:
        held = model.positions(layer, head)
        assert np.setdiff1d(np.arange(200), held).tolist() == (
            model.found.positions[layer, head].tolist()
        )
    kept = {tuple(model.positions(layer, head)) for layer, head in heads}
    assert len(kept) > 1, "heads that hold the same rows show little"
    assert model.smallest_search_margin == np.inf


def test_masking_and_dropping_agree(tiny: Path, rng: np.random.Generator) -> None:
    dropping, masking = (
        recall_reference(tiny, slack=40, n_pos=110, keep_all=keep) for keep in (False, True)
    )
    for size in (30, 70, 1, 1, 40, 9, 100):
        tokens = random_tokens(rng, size)
        np.testing.assert_allclose(dropping.eval(tokens), masking.eval(tokens), atol=EXACT)
        np.testing.assert_array_equal(dropping.found.positions, masking.found.positions)
    assert dropping.n_rebases > 0


def naive_shares(
    shown: ReferenceLlama, layer: int, n_together: int
) -> tuple[list[list[int]], FloatArray]:
    """Return positions [n_head_kv][n_found] and shares of the last tokens, which search together.

    The model kept all keys, so they need not come from an archive, and records the last queries.
    """
    cache, rope = shown._caches[layer], Rope(shown.weights)
    assert cache.archive is not None
    size, n_archived = shown.weights.hyperparameters.head_size, cache.archive.n_positions
    tokens = range(shown.n_tokens - n_together, shown.n_tokens)
    assert cache.queries.positions[-n_together:].tolist() == list(tokens)

    def exact(query: FloatArray, keys: list[FloatArray]) -> FloatArray:
        logits: FloatArray = np.array([query @ key for key in keys]) / np.sqrt(size)
        return logits

    all_found, all_shares = [], np.zeros((N_HEAD, n_together, n_retrieved(n_together)))
    for head in range(N_HEAD_KV):
        held = {p: cache.keys[head, p] for p in shown.positions(layer, head).tolist()}
        archived, codes = {}, {}
        for first in range(0, n_archived, 128):
            place, page = max(first - shown._shift, 0), range(first, min(first + 128, n_archived))
            for p in page:
                turn = place + p - first - cache.rotary_positions[head, p]
                archived[p] = rope.rotate(cache.keys[head, p][None, None], np.array([turn]))[0, 0]
            centre = np.mean([archived[p] for p in page], axis=0).astype(np.float16).astype(float)
            for p in page:
                r = hadamard(archived[p] - centre)
                scale = np.float16((r**2).sum() / np.abs(r).sum())
                codes[p] = centre, np.where(r >= 0, 1, -1).reshape(-1, 4), float(scale)
        scores = dict.fromkeys(sorted(set(archived) - set(held)), -np.inf)
        asking = list(product(range(GROUP * head, GROUP * (head + 1)), range(n_together)))
        for member, i in asking:
            query = cache.queries.rotated[member, i - n_together]
            lse = np.log(np.exp(exact(query, [held[p] for p in held if p <= tokens[i]])).sum())
            parts = hadamard(query).reshape(-1, 4)
            most = np.abs(parts).sum(axis=1)
            step = 2 * most.max() / 63
            for p in scores:
                centre, signs, scale = codes[p]
                entries = np.rint(((parts * signs).sum(axis=1) + most) / step)
                dot = step * entries.sum() - most.sum()
                logit = (query @ centre + scale * dot) / np.sqrt(size)
                scores[p] = max(scores[p], logit - lse)
        found = sorted(sorted(scores, key=lambda p: (-scores[p], p))[: n_retrieved(n_together)])
        all_found.append(found)
        for member, i in asking:
            query = cache.queries.rotated[member, i - n_together]
            rows = [archived[p] for p in found] + [held[p] for p in held if p <= tokens[i]]
            paid = np.exp(exact(query, rows))
            all_shares[member, i] = (paid / paid.sum())[: n_retrieved(n_together)]
    return all_found, all_shares


@pytest.mark.parametrize(
    ("n_pos", "n_last", "n_together"), [(None, 1, 1), (130, 9, 9), (180, 45, 13)]
)
def test_a_head_retrieves_the_best_rows_outside_its_cache(
    tiny: Path, rng: np.random.Generator, n_pos: int | None, n_last: int, n_together: int
) -> None:
    """Against a second implementation; two query heads, so 45 tokens are 32 and 13."""
    policy = "snap:queries=16,pool=3"
    model = recall_reference(tiny, slack=45, keep_all=True, n_pos=n_pos, policy=policy)
    model.eval(random_tokens(rng, 200))
    model.eval(random_tokens(rng, n_last))
    assert (model.n_rebases > 0) == (n_pos is not None)
    assert model.found.shares.shape == (N_LAYER, N_HEAD, n_together, n_retrieved(n_together))
    for layer in range(N_LAYER):
        positions, shares = naive_shares(model, layer, n_together)
        assert model.found.positions[layer].tolist() == positions
        np.testing.assert_allclose(model.found.shares[layer], shares, atol=EXACT)
    margin = model.smallest_search_margin
    assert 0 < margin < 1
    model.eval(random_tokens(rng, 60), ubatch=1)
    assert 0 <= model.smallest_search_margin <= margin


def test_all_heads_attend_to_the_most_retrieved_passage(
    tiny: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a single token after measuring the heads, against a second implementation."""
    monkeypatch.setattr(search, "MEASURED", 40)
    model = recall_reference(tiny, slack=45, recall=90)
    model.eval(random_tokens(rng, 450))
    heads, archive = model._heads, model._caches[0].archive
    assert heads.searching is not None
    assert archive is not None
    assert heads.searching.sum() == 2
    interest = np.zeros(20)
    heads.interest = interest.copy()
    sizes = (9, 1, 1, 30, 1, 1, 1)
    for size in sizes:
        model.eval(random_tokens(rng, size))
        focus = [int(interest.argmax())] if size == 1 else []
        interest *= 0.5 ** (size / 32)
        for layer, head in HEADS:
            found = model.found.positions[layer, head]
            found = found[found >= 0]
            held = model.positions(layer, head)
            read = [p for p in range(archive.n_positions) if p not in held and p // 32 in focus]
            assert set(read) <= set(found.tolist())
            if heads.searching[layer, head]:
                assert found.size == min(270, 68 * size) + len(read)
            else:
                assert found.tolist() == read
                continue
            for query_head in range(GROUP * head, GROUP * (head + 1)):
                shares = model.found.shares[layer, query_head]
                np.add.at(interest, found // 32, (shares**2).sum(axis=0)[: found.size])
        assert bool(focus) == (size == 1)
