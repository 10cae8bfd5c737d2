"""Retrieved rows equal the NumPy reference; retrieving all rows equals the full cache."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oracle import Step, assert_same_rows, clear_steps, do_step, read
from pyh2o import Llama
from pyh2o.cache.settings import MAX_RETRIEVED
from pyh2o.errors import SettingsError
from research.reference import ReferenceLlama, as_float32
from some_policies import in_research
from tiny_gguf import write_tiny_gguf
from tiny_llama import (
    EXACT_ROWS,
    exact_kernels,
    random_tokens,
    stored_as,
    tiny_llama,
    tiny_parent,
)

FloatArray = npt.NDArray[np.floating[Any]]

HEAVY, RECENT, RECALL = 24, 20, 30
N_VOCAB = 384

# Ways to chunk a text, many queries, exhausted positions, and a policy with its own last
# queries. One layer: retrieved rows of a second one would already differ by rounding.
CASES: dict[str, dict[str, Any]] = {
    "one by one": {"slack": 1, "n_head_kv": 2},
    "few": {"slack": 8, "n_head_kv": 2},
    "a group of many": {"slack": 12, "n_head_kv": 2},
    "groups of many": {"slack": 24, "n_head_kv": 1},
    "heads of 20": {"slack": 12, "n_head_kv": 2, "head_size": 20},
    # with more heads few texts have no close choice
    "heads of 96": {"slack": 12, "n_head": 2, "n_head_kv": 1, "head_size": 96},
    "re-based": {"slack": 12, "n_head_kv": 2, "n_pos": 160},
    "re-based one by one": {"slack": 1, "n_head_kv": 2, "n_pos": 160},
    "packed": {"slack": 12, "n_head_kv": 2, "n_pos": HEAVY + RECENT + 12},
    "few positions of LongRoPE": {
        "slack": 12,
        "n_head_kv": 2,
        "arch_variant": "llama_longrope",
        "n_ctx_train": 1024,
        "n_pos": 256,
    },
    "many positions of LongRoPE": {
        "slack": 12,
        "n_head_kv": 2,
        "arch_variant": "llama_longrope",
        "n_pos": 160,
    },
    "with queries of the policy": {"slack": 12, "n_head_kv": 2, "policy": "snap:queries=8,pool=3"},
    "with all keys": {"slack": 12, "n_head_kv": 2, "policy": in_research("keydiff:KeyDiff")},
}
# Long enough that at the end only one in four heads searches.
LONG = {"slack": 40, "n_head_kv": 4, "policy": in_research("keydiff:KeyDiff")}


def models(path: Path, case: dict[str, Any], **settings: Any) -> tuple[ReferenceLlama, Llama]:
    case = dict(case)
    n_head_kv, n_pos = case.pop("n_head_kv"), case.pop("n_pos", 4096)
    policy, recall = case.pop("policy", "h2o"), case.pop("recall", RECALL)
    names = ("arch_variant", "n_ctx_train", "n_head", "head_size")
    model = {name: case.pop(name) for name in names if name in case}
    model = {"n_ctx_train": n_pos, "n_layer": 1, **model}
    write_tiny_gguf(path, seed=3, n_head_kv=n_head_kv, **model)
    reference = ReferenceLlama.from_gguf(
        path,
        heavy=HEAVY,
        recent=RECENT,
        recall=recall,
        archive_rounding=as_float32,
        n_pos=n_pos,
        policy=policy,
        **case,
    )
    mine: dict[str, Any] = {
        "hh": HEAVY + recall,  # retrieved rows belong to the same sum
        "recent": RECENT,
        "recall": recall,
        "recall_type": "f32",
        "policy": policy,
        "logits_all": True,
        "n_ctx": 128,
    }
    return reference, tiny_llama(path, **{**mine, **case, **EXACT_ROWS, **settings})


def found_weights(llm: Llama, n_tokens: int) -> FloatArray:
    return np.array(llm.text.cache.found(n_tokens))


def assert_retrieves(llm: Llama, steps: list[Step]) -> None:
    for step in steps:
        do_step(llm, step)
        mine = llm.scores[llm.n_tokens - len(step.tokens) : llm.n_tokens]
        np.testing.assert_allclose(mine, step.logits, atol=2e-4, rtol=0)
        assert_same_rows(llm.kv_rows, step.rows)
        weights = found_weights(llm, step.found.size)
        np.testing.assert_allclose(weights, step.found, atol=1e-4, rtol=1e-3)
        assert llm.kv.found_share == pytest.approx(step.found_share, abs=1e-5)


@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "-") for name in CASES])
def test_retrieved_rows_equal_the_reference(
    tmp_path: Path, rng: np.random.Generator, case: str
) -> None:
    """Also after a tail is removed, with every kernel and with ggml's ops."""
    path = tmp_path / "tiny.gguf"
    reference, llm = models(path, CASES[case])
    size = reference.eviction.slack if reference.eviction else 1
    sizes = [size] * max(130 // size, 5)
    # not a whole batch, whose native scores would be reset
    sizes += [-3, size, size, -5, *[size] * (60 // size)] if size > 8 else [size] * 5
    steps, reference = clear_steps(reference, rng, sizes)
    # a single token retrieves a quarter
    assert reference.found.positions.shape[-1] == (RECALL if size > 1 else -(-RECALL // 4))
    assert steps[-1].found_share > 0.01
    with llm:
        assert_retrieves(llm, steps)
    for attention in exact_kernels(path):
        _, llm = models(path, CASES[case], attention=attention)
        with llm:
            assert_retrieves(llm, steps)
    _, llm = models(path, CASES[case], attention="ops", flash_attn=False)
    with llm:
        assert_retrieves(llm, steps)


@pytest.mark.parametrize("case", ["few", "groups of many", "re-based", "packed", "with all keys"])
def test_dropped_rows_are_not_retrieved(
    tmp_path: Path, rng: np.random.Generator, case: str
) -> None:
    """Whether they were archived already or not; adjacent rows are, as in the reference."""
    path = tmp_path / "tiny.gguf"
    reference, llm = models(path, CASES[case])
    assert reference.eviction is not None
    size = reference.eviction.slack
    many, n = [size] * (40 // size), 120 // size * size
    steps, _ = clear_steps(
        reference, rng, [*[size] * (n // size), (50, n - 4), *many, (20, 30), *many, *many]
    )
    with llm:
        assert_retrieves(llm, steps)
        llm.text.cache.reset_found()
        llm.eval(random_tokens(rng, 3))
        found = np.flatnonzero(found_weights(llm, n + 20))
        assert not np.isin([*range(20, 30), *range(50, n - 4)], found).any()
        assert np.isin([*range(30, 50), *range(n - 4, n)], found).any()


PINS = [(10, 14), (61, 66), (130, 132)]  # the last in the second page of the archive


@pytest.mark.parametrize("case", ["heads of 20", "re-based", "packed"])
def test_pins_restore_rows_from_the_archive_as_in_the_reference(
    tmp_path: Path, rng: np.random.Generator, case: str
) -> None:
    """Immediately, in every head, each at its own position, and they stay."""
    path = tmp_path / "tiny.gguf"
    reference, llm = models(path, CASES[case])
    assert reference.eviction is not None
    size = reference.eviction.slack
    before, reference = clear_steps(reference, rng, [size] * (170 // size))
    reference.pin_spans(PINS)
    after, reference = clear_steps(reference, rng, [size] * (30 // size))
    pinned = [position for start, end in PINS for position in range(start, end)]
    with llm:
        assert_retrieves(llm, before)
        assert not np.isin(pinned, llm.kv_rows(0)[0]).all()
        llm.pin_spans(PINS)
        for layer in range(len(after[0].rows)):
            for positions in llm.kv_rows(layer)[0]:
                assert np.isin(pinned, positions).all()
        assert_retrieves(llm, after)
        copy, n_tokens = llm.save_state(), llm.n_tokens
        llm.eval([1, 2, 3])
        logits = llm.scores[n_tokens : n_tokens + 3].copy()
        llm.load_state(copy)
        llm.eval([1, 2, 3])
        np.testing.assert_array_equal(llm.scores[n_tokens : n_tokens + 3], logits)


def test_the_heads_that_gain_most_search_for_the_others(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """As in the reference, except for close choices; states and marks keep the searching heads."""
    path = tmp_path / "tiny.gguf"
    reference, _ = models(path, LONG)
    tokens: list[int] = rng.integers(0, N_VOCAB, 680).tolist()
    expected = np.concatenate(
        [read(reference, np.array(tokens[at : at + 40])) for at in range(0, 680, 40)]
    )
    heads, retrieved = reference._heads, reference.found.positions[0]
    assert heads.searching is not None
    assert (retrieved >= 0).sum(axis=1).tolist() == np.where(
        heads.searching[0], 4 * RECALL, 0
    ).tolist()
    for attention in ("auto", *exact_kernels(path), "ops"):
        _, llm = models(path, LONG, attention=attention, flash_attn=attention != "ops")
        with llm:
            for at in range(0, 680, 40):
                llm.eval(tokens[at : at + 40])
            off = np.abs(llm.scores[:680] - expected)
            assert np.median(off[-80:]) < 1e-3
            assert llm.kv.found_share == pytest.approx(reference.found_share, abs=1e-3)
    _, llm = models(path, LONG)
    _, other = models(path, LONG)
    with llm, other:
        for at in range(0, 570, 40):
            llm.eval(tokens[at : min(at + 40, 570)])
        other.load_kv_state(llm.kv_state(), tokens[:570])
        for one in (llm, other):
            logits = []
            one.text.cache.mark()
            for _ in range(2):
                assert one.text.remove_tail(570)
                one.eval(tokens[570:598])  # all heads are measured
                one.eval(tokens[598:602])
                logits.append(one.scores[570:602].copy())
            assert np.array_equal(*logits)
            one.eval(tokens[602:])
        assert np.array_equal(llm.scores[570:680], other.scores[570:680])


@pytest.mark.parametrize("n_rows", [45, 40])
def test_all_heads_attend_to_the_most_retrieved_rows(
    tmp_path: Path, rng: np.random.Generator, n_rows: int
) -> None:
    """A passage, if rows are free, as in the reference; states and marks keep the passage."""
    path, case = tmp_path / "tiny.gguf", LONG | {"recall": n_rows}
    reference, _ = models(path, case, n_ctx=256)
    sizes = [40] * 20 + [1] * 6 + [40] + [1] * 6
    tokens: list[int] = rng.integers(0, N_VOCAB, sum(sizes)).tolist()
    expected, at = [], 0
    for size in sizes:
        expected.append(read(reference, np.array(tokens[at : at + size])))
        at += size
        alone = reference._heads.focus.size
        assert alone == (size == 1 and n_rows == 45)
    found = (reference.found.positions[0] >= 0).sum(axis=1)
    searching = reference._heads.searching
    assert searching is not None
    assert ((found[~searching[0]] > 8) == (n_rows == 45)).all()
    for attention in ("auto", *exact_kernels(path), "ops"):
        _, llm = models(path, case, n_ctx=256, attention=attention, flash_attn=attention != "ops")
        with llm:
            for size in sizes:
                llm.eval(tokens[llm.n_tokens : llm.n_tokens + size])
            off = np.abs(llm.scores[: len(tokens)] - np.concatenate(expected))
            assert np.median(off[800:806]) < 1e-3
            assert np.median(off[-6:]) < 1e-3
            assert llm.kv.found_share == pytest.approx(reference.found_share, abs=1e-3)
    _, llm = models(path, case, n_ctx=256)
    _, other = models(path, case, n_ctx=256)
    with llm, other:
        for size in sizes[:23]:
            llm.eval(tokens[llm.n_tokens : llm.n_tokens + size])
        other.load_kv_state(llm.kv_state(), tokens[: llm.n_tokens])
        llm.text.cache.mark()
        logits = []
        for one in (llm, llm, other):
            one.text.remove_tail(803)
            for size in sizes[23:]:
                one.eval(tokens[one.n_tokens : one.n_tokens + size])
            logits.append(one.scores[803 : len(tokens)].copy())
        np.testing.assert_array_equal(logits[0], logits[1])
        np.testing.assert_array_equal(logits[0], logits[2])


ARCHITECTURES = (
    "llama",
    "frequency_factors",
    "yarn",
    "longrope",
    "neox",
    "partial",
    "every_fourth_unrotated",
    "normed_after_rope",
    "learned_positions",
    "capped",
)


def logits_of_the_full_cache(path: Path, tokens: list[int]) -> FloatArray:
    full = tiny_parent(path, n_ctx=512, logits_all=True, flash_attn=False, **EXACT_ROWS)
    full.eval(tokens)
    logits: FloatArray = full.scores[: len(tokens)].copy()
    full.close()
    return logits


def assert_equals_the_full_cache(
    path: Path,
    tokens: list[int],
    *,
    atol: float = 3e-4,
    sizes: tuple[int, ...] = (1, 12, 40),
    **settings: Any,
) -> None:
    """With more rows to retrieve than exist, logits equal the full cache for any chunks."""
    expected = logits_of_the_full_cache(path, tokens)
    budget: dict[str, Any] = {"hh": HEAVY + 400, "recent": RECENT, "slack": 40, "recall": 400}
    for size in sizes:
        with tiny_llama(
            path,
            n_ctx=512,
            logits_all=True,
            **{"recall_type": "f32", **EXACT_ROWS, **budget, **settings},
        ) as llm:
            for first in range(0, len(tokens), size):
                llm.eval(tokens[first : first + size])
            assert llm.kv.compactions > 1
            np.testing.assert_allclose(llm.scores[: len(tokens)], expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("arch", "attention"),
    [*product(ARCHITECTURES, ("auto", "ops")), ("llama", "ops without flash attention")],
)
def test_retrieving_all_rows_equals_the_full_cache(
    tmp_path: Path, rng: np.random.Generator, arch: str, attention: str
) -> None:
    """For all kinds of rotation, normalization and scaling: the oracle is llama.cpp's cache.

    More rows are retrieved than by default for any window.
    """
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, arch_variant=arch, n_ctx_train=4096)
    tokens = random_tokens(rng, MAX_RETRIEVED + HEAVY + RECENT + 40)
    kind, _, without = attention.partition(" ")
    # ggml's flash attention rounds rows to f16
    atol = 0.02 if attention == "ops" or arch == "capped" else 5e-4
    assert_equals_the_full_cache(path, tokens, atol=atol, attention=kind, flash_attn=not without)


@pytest.mark.parametrize("head_size", [20, 24, 32, 80, 128])
def test_heads_of_any_size_are_searched(
    tmp_path: Path, rng: np.random.Generator, head_size: int
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, head_size=head_size)
    tokens: list[int] = rng.integers(3, N_VOCAB, 130).tolist()
    assert_equals_the_full_cache(path, tokens, sizes=(12,))


def test_heads_that_cannot_be_coded_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, head_size=18)
    with pytest.raises(SettingsError, match=r"not a multiple of 4: .*--recall 0"):
        tiny_llama(path, hh=HEAVY, recent=RECENT, recall=8, n_ctx=128)
    tiny_llama(path, hh=HEAVY, recent=RECENT, n_ctx=128, attention="ops").close()


# Relative errors of logits.
ROUNDING = {"f32": 1e-4, "f16": 0.01, "q8_0": 0.06, "q4_0": 0.6}


@pytest.mark.parametrize("attention", ["auto", "ops"])
@pytest.mark.parametrize(
    ("kv_type", "archive_type"),
    [
        ("f32", "f16"),
        ("f32", "q8_0"),
        ("f32", "q4_0"),
        ("f16", "f16"),
        ("q8_0", "q8_0"),
        ("q4_0", "q4_0"),
        ("q8_0", "f32"),
    ],
)
def test_rounded_rows_are_retrieved(
    tmp_path: Path, rng: np.random.Generator, kv_type: str, archive_type: str, attention: str
) -> None:
    """Heads of 64 elements, which quantised caches mix and archives do not."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, head_size=64)
    tokens: list[int] = rng.integers(3, N_VOCAB, 170).tolist()
    expected = logits_of_the_full_cache(path, tokens)[60:]
    budget: dict[str, Any] = {"hh": HEAVY + 400, "recent": RECENT, "slack": 12}
    errors = []
    for recall in (400, 0):
        with tiny_llama(
            path,
            n_ctx=512,
            logits_all=True,
            attention=attention,
            flash_attn=True,
            recall_type=archive_type,
            **stored_as(kv_type),
            **{**budget, "hh": budget["hh"] - (0 if recall else 400), "recall": recall},
        ) as llm:
            llm.eval(tokens)
            errors.append(np.abs(llm.scores[60:170] - expected).mean() / np.abs(expected).mean())
    assert errors[0] < max(ROUNDING[kv_type], ROUNDING[archive_type])
    assert errors[1] > errors[0]  # the retrieved rows matter


def test_before_any_eviction_an_archive_changes_nothing(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Invariant 10, except for rounding in blocks of other queries."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3)
    tokens: list[int] = rng.integers(0, N_VOCAB, 50).tolist()
    settings: dict[str, Any] = {"recent": RECENT, "slack": 20, "logits_all": True, "n_ctx": 128}
    with (
        tiny_llama(path, hh=HEAVY, **settings) as plain,
        tiny_llama(path, hh=HEAVY + 12, recall=12, **settings) as finding,
    ):
        for llm in (plain, finding):
            llm.eval(tokens)
        np.testing.assert_allclose(finding.scores[:50], plain.scores[:50], atol=1e-5, rtol=0)
        assert finding.kv.found_share == 0
        more: list[int] = rng.integers(0, N_VOCAB, 60).tolist()
        for llm in (plain, finding):
            llm.eval(more)
        assert np.abs(finding.scores[100:110] - plain.scores[100:110]).max() > 1e-3
        assert finding.kv.found_share > 0
        assert (plain.kv.archived, plain.kv.bytes_archive, plain.kv.n_looked) == (0, 0, 0)


def test_memory_does_not_grow(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_ctx_train=160)
    settings: dict[str, Any] = {"hh": HEAVY + RECALL, "recent": RECENT, "slack": 12}
    with tiny_llama(path, recall=RECALL, n_ctx=128, **settings) as llm:
        sizes = set()
        for _ in range(60):
            llm.eval(rng.integers(0, N_VOCAB, int(rng.integers(1, 30))).tolist())
            kv = llm.kv
            assert kv.used <= kv.capacity <= kv.cells
            sizes.add((kv.bytes_k, kv.bytes_v, kv.bytes_scores, kv.cells))
        assert len(sizes) == 1
        assert llm.kv.rebases > 3
        # all rows at the last compaction except the recent rows, which stay
        assert not llm.text.can_remove_tail(llm.kv.archived)
        assert llm.text.can_remove_tail(llm.kv.archived + 1)


def test_a_limited_archive_drops_its_oldest_pages(
    tmp_path: Path, rng: np.random.Generator, recwarn: pytest.WarningsRecorder
) -> None:
    """The drop is reported once and counted; a state of the remaining pages resumes."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=8, n_ctx_train=160)
    settings: dict[str, Any] = {"hh": HEAVY + RECALL, "recent": RECENT, "slack": 12}
    settings |= {"recall": RECALL, "recall_mib": 2, "recall_type": "f32", "n_ctx": 128}
    settings["logits_all"] = True
    with tiny_llama(path, **settings) as llm, tiny_llama(path, **settings) as other:
        for _ in range(40):
            llm.eval(rng.integers(0, N_VOCAB, 60).tolist())
            assert 0 < llm.kv.bytes_archive <= 2 * 2**20
        assert llm.kv.unarchived > 0
        (line,) = [str(each.message) for each in recwarn]
        assert re.match(r"the archive is full at \d+ tokens \(2 MiB\): .* recall_mib=4 ", line)
        assert not found_weights(llm, llm.kv.unarchived).any()
        other.load_kv_state(llm.kv_state(), llm.input_ids[: llm.n_tokens].copy())
        more: list[int] = rng.integers(0, N_VOCAB, 100).tolist()
        for each in (llm, other):
            each.eval(more)
        np.testing.assert_array_equal(llm.scores[2400:2500], other.scores[2400:2500])
