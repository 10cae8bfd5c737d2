"""The caches whose quality is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measured import CACHES, TRAINED
from pyh2o.errors import SettingsError
from research.eval.caches import FULL_CACHE, Compute, MeasuredCache, open_llama
from research.eval.measurement import CacheSettings, policy_named


def test_caches() -> None:
    caches = CACHES.for_text(600)
    assert [(one.name, one.rows, one.heavy, one.recent) for one in caches] == [
        ("full", 0, 0, 0),
        ("h2o, 25 %", 150, 75, 75),
        ("streaming, 25 %", 150, 75, 75),
        ("h2o, 100 rows", 100, 50, 50),
        ("streaming, 100 rows", 100, 50, 50),
    ]
    assert [one.is_full for one in caches] == [True] + 4 * [False]
    assert [one.is_streaming for one in caches] == [False, False, True, False, True]
    # of the rows of a budget an eighth is found, but for sinks and a window alone
    assert [one.recall for one in caches] == [0, 18, 0, 12, 0]


def test_parts_of_a_budget() -> None:
    settings = CacheSettings(
        ("snap:queries=8", "full"), (100,), 0.3, pinned=10, positions=("original", "dense")
    )
    _, original, dense = settings.for_text(600)
    assert (original.pinned, original.heavy, original.recent) == (10, 63, 27)
    assert (original.rows, original.recall) == (100, 11)
    assert original.name == "snap:queries=8, 100 rows"
    assert dense == replace(original, name=f"{original.name}, dense", positions="dense")
    all_recent = replace(settings, recent_share=1.0, positions=("original",))
    assert [one.heavy for one in all_recent.for_text(600)[1:]] == [0]


def test_recall_is_a_count_or_a_fraction_and_a_cache_of_its_own() -> None:
    settings = CacheSettings(("h2o",), (100,), 0.5, recalls=(None, 0, 0.1, 64))
    caches = settings.for_text(600)[1:]
    assert [(one.name, one.recall, one.rows) for one in caches] == [
        ("h2o, 100 rows", 12, 100),
        ("h2o, 100 rows, no recall", 0, 100),
        ("h2o, 100 rows, recall 10 %", 60, 100),
        ("h2o, 100 rows, recall 64 rows", 64, 100),
    ]
    assert caches[1].eviction()["recall"] == 0
    assert caches[2].eviction() == {**caches[1].eviction(), "recall": 60}
    (streaming,) = replace(settings, policies=("streaming",)).for_text(600)[1:]
    assert (streaming.name, streaming.recall) == ("streaming, 100 rows", 0)
    assert streaming.is_streaming


def test_full_cache_keeps_no_archive() -> None:
    assert FULL_CACHE.eviction() == {"hh": 0.5, "recent": 0.5, "recall": 0}


def test_policies_are_written_in_one_way() -> None:
    assert policy_named("snap:queries=32") == "snap"
    assert policy_named("full") == "full"
    with pytest.raises(SettingsError, match="unknown policy 'h3o'"):
        policy_named("h3o")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recent_share": 0.0}, "--recent-share 0: give more than 0"),
        ({"recent_share": 1.5}, "--recent-share 1.5"),
    ],
)
def test_refused_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(CACHES, **change).for_text(600)


def test_budget_without_a_free_row_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--budget 0.01 is 6 rows of 600 .* besides 6 that"):
        replace(CACHES, budgets=(0.01,), pinned=6).for_text(600)
    message = r"--recall 94 is 94 of the 100 rows of --budget 100, .* besides 6 that are pinned"
    with pytest.raises(SettingsError, match=message):
        replace(CACHES, budgets=(100,), pinned=6, recalls=(94,)).for_text(600)


def test_opened_caches_keep_what_they_say(path: Path) -> None:
    cache = MeasuredCache(
        "a",
        policy="streaming",
        rows=90,
        heavy=40,
        recent=40,
        pinned=10,
        recall=16,
        positions="dense",
    )
    with open_llama(path, cache, window=600, compute=Compute(threads=1)) as llm:
        kv = llm.kv
        assert (kv.heavy, kv.recent, kv.pinned, kv.window) == (24, 40, 10, 600)
        assert kv.limits.recall == 16
        assert (kv.policy, kv.positions) == ("streaming", "dense")


@pytest.mark.parametrize("tokens", [32, 600, TRAINED])
def test_full_cache_evicts_nothing(path: Path, tokens: int) -> None:
    with open_llama(path, FULL_CACHE, window=tokens, compute=Compute(threads=1)) as llm:
        llm.eval([5] * tokens)
        assert llm.kv.compactions == 0
        assert llm.kv.used == tokens
