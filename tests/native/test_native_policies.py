"""Every policy in the native library against the NumPy reference, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import Step, assert_same_rows, assert_same_steps, clear_steps
from pyh2o import Llama
from pyh2o.cache.settings import Attention
from pyh2o.errors import SettingsError
from pyh2o.policies import POLICIES, parse_policy
from research.reference import ReferenceLlama
from some_policies import EXAMPLES, in_research
from tiny_gguf import write_tiny_gguf
from tiny_llama import EXACT_ROWS, assert_same_cache, tiny_llama

HEAVY, RECENT, SLACK = 14, 9, 7
N_LAYER, N_VOCAB = 3, 384
N_POS = 96  # trained context
# Two correct implementations round differently: a closer choice may differ.
CLEAR_MARGIN = 2e-6

# each policy with every parameter that enables a feature
ALL = [
    *POLICIES,
    *EXAMPLES,
    "h2o-decay:half_life=12",
    "h2o-far:near=4,half_life=12",
    "roco:guard=0.5",
    "snap:queries=1,pool=1",
    "snap:queries=3,pool=1",
    "snap:queries=6,pool=3",
    in_research("random_rows:NACL:queries=4,random=0.5,seed=9"),
    in_research("expected:Expected:queries=6,horizon=20"),
    in_research("expected:Expected:queries=6,covariance=true"),
    "streaming:sinks=2",
    in_research("random_rows:RandomRows:seed=5"),
]
EXPECTED = in_research("expected:Expected:queries=6")
RANDOM = in_research("random_rows:RandomRows")
# one of each kind of sums, queries and keys that a policy collects
KINDS = ["h2o-far:near=4,half_life=12", "roco", "snap:queries=6,pool=3", EXPECTED, RANDOM]
# both paths through the graph: our op, and llama.cpp's without flash attention
WAYS: list[Attention] = ["auto", "ops"]
MODEL: dict[str, Any] = {"seed": 3, "n_layer": N_LAYER, "n_ctx_train": N_POS}


def llama_of(path: Path, policy: str, attention: Attention = "ops", **settings: Any) -> Llama:
    values: dict[str, Any] = {
        "hh": HEAVY,
        "recent": RECENT,
        "slack": SLACK,
        **EXACT_ROWS,
        "flash_attn": attention != "ops",
        "logits_all": True,
    }
    return tiny_llama(path, policy=policy, attention=attention, **{**values, **settings})


reference_of = partial(
    ReferenceLlama.from_gguf, heavy=HEAVY, recent=RECENT, slack=SLACK, n_pos=N_POS
)


steps_of = partial(clear_steps, margin=CLEAR_MARGIN)


def assert_same(llm: Llama, steps: Sequence[Step]) -> None:
    assert_same_steps(llm, steps, logits=5e-4, scores=2e-4)


@pytest.mark.parametrize("policy", ALL)
def test_every_step_equals_the_reference(path: Path, rng: np.random.Generator, policy: str) -> None:
    """Long enough for re-bases: 96 positions, 210 tokens."""
    steps, reference = steps_of(reference_of(path, policy=policy), rng, [5] * 42)
    for attention in WAYS:
        llm = llama_of(path, policy, attention, n_ubatch=5)
        assert_same(llm, steps)
        assert llm.kv.compactions == reference.n_compactions > 10
        assert llm.kv.rebases == reference.n_rebases > 0


@pytest.mark.parametrize("policy", ["h2o-far:near=4,half_life=12", "roco"])
def test_rows_equal_the_reference_with_ggmls_flash_attention(
    tmp_path: Path, rng: np.random.Generator, policy: str
) -> None:
    """One layer: flash attention rounds the input of the next layer."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **{**MODEL, "n_layer": 1})
    steps, reference = steps_of(reference_of(path, policy=policy), rng, [7] * 20)
    with llama_of(path, policy, flash_attn=True, n_ubatch=7) as llm:
        for step in steps:
            llm.eval(step.tokens)
            assert_same_rows(llm.kv_rows, step.rows)
        assert llm.kv.compactions == reference.n_compactions > 10


@pytest.mark.parametrize("policy", ["snap:queries=1,pool=1", "snap:queries=6", EXPECTED, "roco"])
def test_packed_rows_equal_the_reference(
    tmp_path: Path, rng: np.random.Generator, policy: str
) -> None:
    """Every compaction rotates the queries together with the keys."""
    n_pos = HEAVY + RECENT + SLACK
    path = write_tiny_gguf(tmp_path / "tiny.gguf", **{**MODEL, "n_ctx_train": n_pos})
    steps, _ = steps_of(reference_of(path, policy=policy, n_pos=n_pos), rng, [1] * 120)
    llm = llama_of(path, policy, n_ctx=64, n_ubatch=1)
    assert_same(llm, steps)
    assert llm.kv.rebases > 5


@pytest.mark.parametrize("policy", ["h2o-decay:half_life=12", "h2o-far:near=4", "roco"])
def test_a_slack_of_one_equals_the_reference(
    path: Path, rng: np.random.Generator, policy: str
) -> None:
    """A compaction at every token: most queries are older than the last token."""
    steps, _ = steps_of(reference_of(path, policy=policy, slack=1), rng, [1] * 90)
    llm = llama_of(path, policy, "auto", slack=1)
    assert_same(llm, steps)
    assert llm.kv.compactions > 50


@pytest.mark.parametrize("policy", ["h2o-far:near=4", "roco", EXPECTED])
def test_a_removed_tail_equals_the_reference(
    path: Path, rng: np.random.Generator, policy: str
) -> None:
    """The policy ignores queries of removed tokens: compactions follow 3 tokens after a removal."""
    sizes = [*[1] * 65, -3, *[1] * 45, -3, 1, -3, *[1] * 20]
    steps, _ = steps_of(reference_of(path, policy=policy), rng, sizes)
    assert_same(llama_of(path, policy, n_ubatch=1), steps)


SPANS = [(6, 10), (20, 22), (150, 153)]
STARTS = [12, 30, 31, 70]


@pytest.mark.parametrize(
    ("policy", "starts", "spans"),
    [
        ("h2o", STARTS, SPANS),
        ("snap:queries=6", STARTS, SPANS),
        (RANDOM, STARTS, SPANS),
        ("h2o", STARTS, []),
        ("snap:queries=6", [], SPANS),
    ],
)
def test_pinned_and_fair_spans_equal_the_reference(
    path: Path,
    rng: np.random.Generator,
    policy: str,
    starts: list[int],
    spans: list[tuple[int, int]],
) -> None:
    reference = reference_of(path, policy=policy, pinned=1)
    reference.pin_spans(spans)
    reference.share_fairly(starts)
    steps, _ = steps_of(reference, rng, [5] * 24)
    llm = llama_of(path, policy, n_ubatch=5, pinned=1)
    llm.text.cache.pin_spans(spans)
    llm.text.cache.share_fairly(starts)
    assert_same(llm, steps)
    kept = {int(p) for p in llm.kv_rows(0)[0][0]}
    assert {p for start, end in spans for p in range(start, min(end, 120))} <= kept


def test_invalid_spans_are_refused(path: Path) -> None:
    llm = llama_of(path, "h2o")
    for spans in ([(5, 5)], [(5, 4)], [(-1, 3)], [(4, 8), (7, 9)], [(8, 9), (2, 3)]):
        with pytest.raises(SettingsError, match="ascending"):
            llm.text.cache.pin_spans(spans)
    with pytest.raises(SettingsError, match="do not fit"):
        llm.text.cache.pin_spans([(3, 3 + HEAVY + 1)])
    for starts in ([0], [5, 5], [7, 6]):
        with pytest.raises(SettingsError, match="ascending"):
            llm.text.cache.share_fairly(starts)


@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.parametrize("policy", KINDS)
def test_a_saved_state_continues_like_the_text(
    path: Path, rng: np.random.Generator, policy: str, attention: Attention
) -> None:
    """The state includes the policy's sums and queries, the spans and the segments."""
    tokens = rng.integers(0, N_VOCAB, 150).tolist()
    one, other = (llama_of(path, policy, attention, n_ubatch=5) for _ in range(2))
    one.text.cache.pin_spans([(6, 10)])
    one.text.cache.share_fairly([30])
    one.eval(tokens[:77])
    other.load_state(one.save_state())
    for llm in (one, other):
        llm.eval(tokens[77:])
    np.testing.assert_array_equal(other.scores[77:150], one.scores[77:150])
    assert_same_cache(one, other)


@pytest.mark.parametrize("policy", KINDS)
def test_exact_prefill_equals_a_cache_with_as_much_slack(
    path: Path, rng: np.random.Generator, policy: str
) -> None:
    """The policy's sums move to the larger cache and back."""
    tokens = rng.integers(0, N_VOCAB, 90).tolist()
    small = llama_of(path, policy, n_ubatch=5, prefill="exact")
    large = llama_of(path, policy, n_ubatch=5, slack=73 - HEAVY - RECENT)
    for llm in (small, large):
        llm.eval(tokens[:20])
    small.eval(tokens[20:73])
    large.eval(tokens[20:73])
    large.eval(tokens[73:74])  # the cache is full: its first compaction
    small.eval(tokens[73:74])
    for layer in range(N_LAYER):
        for mine, theirs in zip(small.kv_rows(layer), large.kv_rows(layer), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-4, rtol=2e-4)


def test_a_state_identifies_a_policy_by_all_parameters(path: Path) -> None:
    """The policy text of a user contains only parameters that differ from the default."""
    one = llama_of(path, "h2o-decay")
    one.eval([1, 2, 3])
    half_life = parse_policy("h2o-decay").half_life
    llama_of(path, f"h2o-decay:half_life={half_life}").load_state(one.save_state())


def test_policies_without_attention_collect_none(path: Path) -> None:
    """If no attention is collected, the graph has no node for it."""
    llm = llama_of(path, RANDOM, n_ubatch=5)
    llm.eval(list(range(HEAVY + RECENT + SLACK)))
    _, scores = llm.kv_rows(0)
    assert (scores == 0).all()
