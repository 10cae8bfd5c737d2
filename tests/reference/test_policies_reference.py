"""Every policy in the NumPy reference: which rows it keeps and which inputs it collects."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

import research.reference.model as reference_llama
from pyh2o.policies import (
    POLICIES,
    H2ODecay,
    HeadRows,
    Need,
    Policy,
    RoCo,
    Snap,
    Streaming,
    parse_policy,
)
from random_cases import Cases
from research.policies.random_rows import uniform_numbers
from research.reference import (
    EvictionParameters,
    LayerCache,
    ReferenceLlama,
    attend,
    collected_attention,
    compact,
)
from some_policies import EXAMPLES, in_research
from tiny_gguf import write_tiny_gguf

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

N_LAYER, N_HEAD_KV, GROUP, HEAD_SIZE = 3, 2, 2, 8
FREQUENCIES = 100.0 ** -np.linspace(0, 0.75, HEAD_SIZE // 2)

# Small windows of queries and shares that need rounding, so that every part of a rule matters.
ALL_POLICIES = [
    *(cls() for cls in POLICIES.values()),
    *map(parse_policy, EXAMPLES),
    Snap(queries=3, pool=3),
    parse_policy(in_research("random_rows:NACL:queries=4,random=0.5,seed=9")),
    RoCo(guard=0.6),
    H2ODecay(half_life=5),
    Streaming(sinks=100),
]
all_policies = pytest.mark.parametrize("policy", ALL_POLICIES, ids=str)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=6)


def random_tokens(rng: np.random.Generator, n_tokens: int) -> IntArray:
    return rng.integers(3, 384, n_tokens)


def in_float64(path: Path, **settings: Any) -> ReferenceLlama:
    """In float64 rounding cannot change a choice."""
    return ReferenceLlama.from_gguf(path, dtype=np.float64, cache_dtype=np.float64, **settings)


def heads(model: ReferenceLlama) -> list[tuple[int, int]]:
    hyper = model.weights.hyperparameters
    return list(itertools.product(range(hyper.n_layer), range(hyper.n_head_kv)))


def kept_positions(model: ReferenceLlama) -> list[list[int]]:
    return [model.positions(layer, head).tolist() for layer, head in heads(model)]


# ---- kept rows ----


def random_caches(rng: np.random.Generator, n_rows: int) -> list[LayerCache]:
    """Return layers that have seen `n` tokens, with everything a policy may collect.

    Sums are multiples of a third, so that equal ones are common.
    """
    caches = []
    for _ in range(N_LAYER):
        cache = LayerCache(
            N_HEAD_KV,
            HEAD_SIZE,
            cache_dtype=np.float64,
            score_dtype=np.float64,
            n_queries=int(rng.integers(1, 9)),
        )
        positions = np.arange(n_rows)
        keys, values = rng.standard_normal((2, N_HEAD_KV, n_rows, HEAD_SIZE))
        queries = rng.standard_normal((N_HEAD_KV * GROUP, n_rows, HEAD_SIZE))
        cache.append(keys, values, positions)
        cache.add_scores(rng.integers(0, 12, (N_HEAD_KV, n_rows)) / 3)
        cache.add_squares(rng.integers(0, 12, (N_HEAD_KV, n_rows)) / 3)
        cache.record_queries(queries, positions, positions)
        caches.append(cache)
    return caches


def random_parameters(rng: np.random.Generator, n_rows: int) -> EvictionParameters:
    pinned, heavy = (int(count) for count in rng.integers(0, 15, 2))
    bounds = np.sort(rng.choice(np.arange(n_rows + 20), 4, replace=False)).tolist()
    spans = ((bounds[0], bounds[1]), (bounds[2], bounds[3]))
    n_starts = int(rng.integers(0, 4))
    starts = np.sort(rng.choice(np.arange(1, n_rows + 10), n_starts, replace=False)).tolist()
    try:
        return EvictionParameters(
            heavy=heavy,
            recent=int(rng.integers(1, 12)),
            pinned=pinned,
            spans=spans if rng.random() < 0.5 else (),
            starts=tuple(starts),
        )
    except ValueError:  # more spans than heavy rows
        return random_parameters(rng, n_rows)


class Spy:
    """A policy that records the scores it returned."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seen: dict[tuple[int, int], tuple[HeadRows, FloatArray]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def score(self, rows: HeadRows) -> FloatArray:
        scores = self.policy.score(rows)
        self.seen[rows.layer, rows.head] = rows, scores
        return scores


@all_policies
def test_compaction_keeps_the_best_rows(cases: Cases, policy: Policy) -> None:
    """All pinned and recent rows, and the best others of each segment, up to the budget."""
    for _, rng in cases(range(30)):
        n_rows = int(rng.integers(1, 70))
        caches, parameters = random_caches(rng, n_rows), random_parameters(rng, n_rows)
        policy = policy.for_budget(parameters.budget)
        spy: Any = Spy(policy)
        compact(caches, parameters, spy, FREQUENCIES)
        assert len(spy.seen) in (0, N_LAYER * N_HEAD_KV)
        scores = mean_scores(spy, policy)
        for (layer, head), (rows, _) in spy.seen.items():
            assert_the_best_were_kept(
                rows, scores[layer, head], caches[layer].positions(head), parameters
            )


def assert_the_best_were_kept(
    rows: HeadRows, scores: FloatArray, stayed: IntArray, parameters: EvictionParameters
) -> None:
    """For one head that had all rows of the text."""
    n_rows = scores.size
    pinned = np.arange(n_rows) < parameters.pinned
    for start, end in parameters.spans:
        pinned[start:end] = True
    must = pinned.copy()
    must[max(0, n_rows - parameters.recent) :] = True
    kept = np.isin(np.arange(n_rows), stayed)
    assert kept[must].all()
    assert kept.sum() == min(n_rows, parameters.budget)
    assert rows.competing.tolist() == (~must).tolist()
    assert rows.pinned.tolist() == pinned.tolist()
    assert rows.n_places == kept.sum() - must.sum()
    assert rows.newest == n_rows - 1

    order = list(zip(scores.tolist(), range(n_rows), strict=True))
    segments = np.searchsorted(parameters.starts, np.arange(n_rows), side="right")
    for segment in range(len(parameters.starts) + 1):
        inside = (segments == segment) & ~must
        winners = [order[i] for i in np.flatnonzero(inside & kept)]
        losers = [order[i] for i in np.flatnonzero(inside & ~kept)]
        assert not winners or not losers or min(winners) > max(losers)


def mean_scores(spy: Spy, policy: Policy) -> dict[tuple[int, int], FloatArray]:
    """Return the scores averaged over the heads that must agree."""
    scores = {place: given for place, (_, given) in spy.seen.items()}
    if policy.scope == "head":
        return scores
    return {
        (layer, head): np.mean(
            [x for place, x in scores.items() if policy.scope == "cache" or place[0] == layer],
            axis=0,
        )
        for layer, head in scores
    }


@all_policies
def test_dropping_rows_equals_masking_them(
    tiny: Path, rng: np.random.Generator, policy: Policy
) -> None:
    """Over a long text with a removed tail, re-bases, spans and shares."""
    tokens = random_tokens(rng, 210)
    dropping, hiding = (
        in_float64(
            tiny,
            heavy=20,
            recent=14,
            pinned=2,
            slack=8,
            n_pos=128,
            policy=policy,
            keep_all=keep_all,
        )
        for keep_all in (False, True)
    )
    for model in (dropping, hiding):
        model.eval(tokens[:100])
        model.remove(97)
        model.pin_spans([(60, 64), (130, 135)])
        model.share_fairly([40, 120])
    np.testing.assert_allclose(dropping.eval(tokens[100:]), hiding.eval(tokens[100:]), atol=1e-8)
    assert dropping.n_compactions == hiding.n_compactions > 15
    assert dropping.n_rebases == hiding.n_rebases >= 2
    assert kept_positions(dropping) == kept_positions(hiding)
    for layer, head in heads(dropping):
        np.testing.assert_allclose(dropping.scores(layer, head), hiding.scores(layer, head))
        assert dropping.positions(layer, head).size == dropping.n_rows
        assert np.isin(np.arange(130, 135), dropping.positions(layer, head)).all()


def test_policies_keep_different_rows(tiny: Path, rng: np.random.Generator) -> None:
    """Otherwise the tests above would miss a policy that is not called."""
    tokens = random_tokens(rng, 250)
    # Over so few tokens the default half-life hardly matters. The tiny model's rows whose attention
    # varies most also have the highest mean.
    stronger = {"h2o-decay": "h2o-decay:half_life=20", "roco": "roco:guard=1"}
    kept = []
    for name in [*POLICIES, *EXAMPLES]:
        policy = stronger.get(name, name)
        model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=12, slack=4, policy=policy)
        model.eval(tokens)
        kept.append(str(kept_positions(model)))
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize(
    ("policy", "sets"),
    [("h2o", 6), (in_research("one_choice:H2OLayer"), 3), (in_research("one_choice:H2OCells"), 1)],
)
def test_grouped_heads_keep_the_same_rows(
    tiny: Path, rng: np.random.Generator, policy: str, sets: int
) -> None:
    model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=12, slack=4, policy=policy)
    model.eval(random_tokens(rng, 250))
    assert len({str(positions) for positions in kept_positions(model)}) == sets
    of_layers = {str([model.positions(layer, head) for head in range(2)]) for layer in range(3)}
    assert len(of_layers) == (1 if sets == 1 else 3)
    # Each head keeps its own sums.
    assert len({str(model.scores(layer, head)) for layer, head in heads(model)}) == 6


def test_random_rows_are_a_sample_of_the_whole_text(tiny: Path, rng: np.random.Generator) -> None:
    """The random numbers of rows are fixed, so the kept rows are the largest of all so far."""
    policy = in_research("random_rows:RandomRows:seed=4")
    model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=5, policy=policy)
    model.eval(random_tokens(rng, 200))
    for layer, head in heads(model):
        # The last token was read after the compaction.
        numbers = uniform_numbers(4, layer, head, np.arange(194))
        best = np.sort(np.argsort(numbers)[-20:])
        assert model.positions(layer, head).tolist() == [*best, *range(194, 200)]


# ---- collected inputs ----


class Observer:
    """Keeps the probabilities that the model computed for the last chunk, layer by layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.probabilities: list[FloatArray] = []
        monkeypatch.setattr(reference_llama, "attend", self)

    def __call__(self, *arguments: Any) -> Any:
        outputs, probabilities = attend(*arguments)
        self.probabilities.append(probabilities)
        return outputs, probabilities


def test_snap_uses_the_attention_of_the_last_query(
    tiny: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention computed at the compaction equals that of the last forward pass."""
    observer = Observer(monkeypatch)
    model = in_float64(tiny, heavy=12, recent=4, policy="snap:queries=1,pool=1")
    model.eval(random_tokens(rng, 17), ubatch=1)
    for _ in range(60):
        before = {place: model.positions(*place) for place in heads(model)}
        paid = observer.probabilities[-3:]
        model.eval(random_tokens(rng, 1))
        for layer, head in heads(model):
            scores = paid[layer][2 * head : 2 * head + 2, -1].mean(axis=0)
            candidates = before[layer, head][:-4]
            lost = candidates[np.argmin(scores[:-4])]
            expected = [p for p in before[layer, head] if p != lost] + [model.n_tokens - 1]
            assert model.positions(layer, head).tolist() == expected
            stay = np.isin(before[layer, head], model.positions(layer, head))
            stay[-4:] = False
            np.testing.assert_allclose(
                model.scores(layer, head), [*scores[stay], *[0] * 5], atol=1e-12
            )


@pytest.mark.parametrize("slack", [1, 6])
def test_decay_halves_the_sums_per_half_life(
    tiny: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, slack: int
) -> None:
    """Each compaction multiplies sums by 0.5 ** (tokens since the last one / half-life)."""
    observer = Observer(monkeypatch)
    model = in_float64(tiny, heavy=12, recent=4, slack=slack, policy="h2o-decay:half_life=10")
    sums: dict[tuple[int, int], dict[int, float]] = {place: {} for place in heads(model)}
    last = 0
    for _ in range(80):
        compactions = model.n_compactions
        n_tokens = model.n_tokens
        model.eval(random_tokens(rng, 1))
        factor = 1.0
        if model.n_compactions > compactions:
            factor = 0.5 ** ((n_tokens - last) / 10)
            last = n_tokens
        for layer, head in heads(model):
            positions = model.positions(layer, head)
            collected = collected_attention(observer.probabilities[layer - 3], 2)[head]
            sums[layer, head] = {
                int(position): sums[layer, head].get(int(position), 0.0) * factor + paid
                for position, paid in zip(positions, collected, strict=True)
            }
            expected = list(sums[layer, head].values())
            np.testing.assert_allclose(model.scores(layer, head), expected, atol=1e-12)
    assert model.n_compactions >= 10


def test_decay_stops_after_a_tail_was_removed(tiny: Path, rng: np.random.Generator) -> None:
    """A text that is shorter than at the previous compaction has no new tokens."""
    model = in_float64(tiny, heavy=12, recent=10, slack=4, policy="h2o-decay:half_life=1")
    model.eval(random_tokens(rng, 30))
    assert model.n_compactions > 0
    model.compact()
    model.remove(26)
    before = [model.scores(layer, head) for layer, head in heads(model)]
    model.compact()
    for (layer, head), scores in zip(heads(model), before, strict=True):
        np.testing.assert_array_equal(model.scores(layer, head), scores)
    model.eval(random_tokens(rng, 2))
    sums = [model.scores(layer, head) for layer, head in heads(model)]
    model.compact()
    for (layer, head), scores in zip(heads(model), sums, strict=True):
        stay = scores.size - model.scores(layer, head).size
        assert stay == 0
        np.testing.assert_allclose(model.scores(layer, head), scores / 4)


def test_squares_are_averaged_over_the_group(
    tiny: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the squares, not the square of the mean."""
    observer = Observer(monkeypatch)
    spy: Any = Spy(RoCo())
    model = in_float64(tiny, heavy=60, recent=4, slack=20, policy=spy)
    model.eval(random_tokens(rng, 50), ubatch=7)
    model.compact()
    chunks = [observer.probabilities[i : i + 3] for i in range(0, len(observer.probabilities), 3)]
    for (layer, head), (rows, _) in spy.seen.items():
        squares = np.zeros(50)
        for chunk in chunks:
            group = chunk[layer][2 * head : 2 * head + 2]
            squares[: group.shape[2]] += (group**2).mean(axis=0).sum(axis=0)
        np.testing.assert_allclose(rows.squares, squares, atol=1e-12)


def test_only_required_inputs_are_collected(tiny: Path, rng: np.random.Generator) -> None:
    for policy in ALL_POLICIES:
        spy: Any = Spy(policy)
        model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=12, slack=4, policy=spy)
        model.eval(random_tokens(rng, 50))
        for rows, _ in spy.seen.values():
            for name in get_args(Need):
                assert getattr(rows, name).any() == (name in policy.needs)
            assert len(rows.query_positions) == min(policy.n_queries, 12)


# ---- fair shares and pinned spans ----


def test_pinned_spans_stay_within_the_budget(tiny: Path, rng: np.random.Generator) -> None:
    model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=8, slack=4, policy="streaming:sinks=0")
    model.eval(random_tokens(rng, 20))
    model.pin(3)
    model.pin_spans([(6, 10), (50, 53)])
    model.eval(random_tokens(rng, 180))
    expected = [0, 1, 2, *range(6, 10), *range(50, 53), *range(178, 200)]
    assert kept_positions(model) == [expected] * 6
    model.pin_spans([(50, 53)])
    model.eval(random_tokens(rng, 4))
    assert kept_positions(model) == [[0, 1, 2, *range(50, 53), *range(178, 204)]] * 6

    with pytest.raises(ValueError, match="18 positions of pinned spans do not fit the 17 heavy"):
        model.pin_spans([(300, 318)])
    assert model.eviction is not None
    assert model.eviction.spans == ((50, 53),)
    model.reset()
    assert (model.eviction.spans, model.eviction.pinned) == ((), 0)


def test_fair_shares_keep_rows_of_the_start_of_the_text(
    tiny: Path, rng: np.random.Generator
) -> None:
    """A window evicts the first part; with fair shares it keeps its share, without empty cells."""
    model = ReferenceLlama.from_gguf(tiny, heavy=20, recent=8, policy="streaming:sinks=0")
    model.share_fairly([50, 100])
    model.eval(random_tokens(rng, 200))
    # Newest at the last compaction: 198; lengths 50, 50 and 91 of 191, so shares of 5.2, 5.2 and
    # 9.5.
    first, second, third = range(45, 50), range(95, 100), range(181, 191)
    assert kept_positions(model)[0] == [*first, *second, *third, *range(191, 200)]


def test_a_full_cache_refuses_pins(tiny: Path) -> None:
    model = ReferenceLlama.from_gguf(tiny)
    for call in (model.pin_spans, model.share_fairly):
        with pytest.raises(ValueError, match="full cache"):
            call([])
