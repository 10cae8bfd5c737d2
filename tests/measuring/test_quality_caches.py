"""The caches whose quality is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measured import CACHES, TRAINED
from pyh2o.errors import SettingsError
from pyh2o.measuring.caches import FULL_CACHE, Compute, MeasuredCache, open_llama
from pyh2o.measuring.measurement import CacheSettings, default_recent_share, policy_named


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


def test_parts_of_a_budget() -> None:
    settings = CacheSettings(
        ("snap:queries=8", "full"), (100,), 0.3, pinned=10, positions=("original", "dense")
    )
    _, original, dense = settings.for_text(600)
    assert (original.pinned, original.heavy, original.recent) == (10, 63, 27)
    assert original.rows == 100
    assert original.name == "snap:queries=8, 100 rows"
    assert dense == replace(original, name=f"{original.name}, dense", positions="dense")
    all_recent = replace(settings, recent_share=1.0, positions=("original",))
    assert [one.heavy for one in all_recent.for_text(600)] == [0, 0]


def test_recall_is_a_count_or_a_fraction_and_a_cache_of_its_own() -> None:
    settings = CacheSettings(("h2o",), (100,), 0.5, recalls=(0, 0.1, 64))
    caches = settings.for_text(600)[1:]
    assert [(one.name, one.recall, one.rows) for one in caches] == [
        ("h2o, 100 rows", 0, 100),
        ("h2o, 100 rows, recall 10 %", 60, 100),
        ("h2o, 100 rows, recall 64 rows", 64, 100),
    ]
    assert "recall" not in caches[0].eviction()
    assert caches[1].eviction() == {**caches[0].eviction(), "recall": 60}
    streaming = replace(settings, policies=("streaming",)).for_text(600)[1:]
    assert [one.is_streaming for one in streaming] == [True, False, False]


def test_share_and_policies_are_those_of_the_settings() -> None:
    assert default_recent_share() == 0.5
    assert policy_named("snap:queries=32") == "snap"
    assert policy_named("full") == "full"
    with pytest.raises(SettingsError, match="there is no policy 'h3o'"):
        policy_named("h3o")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ()}, "at least one --policy"),
        ({"recent_share": 0.0}, "--recent-share 0: give more than 0"),
        ({"recent_share": 1.5}, "--recent-share 1.5"),
        ({"budgets": (1.5,)}, "--budget 1.5 is more than the whole text"),
    ],
)
def test_refused_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(CACHES, **change)


def test_budget_without_a_free_row_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--budget 0.01 is 6 rows of 600 .* besides 6 that"):
        replace(CACHES, budgets=(0.01,), pinned=6).for_text(600)


def test_opened_caches_keep_what_they_say(path: Path) -> None:
    cache = MeasuredCache(
        "a", policy="streaming", rows=90, heavy=40, recent=40, pinned=10, positions="dense"
    )
    with open_llama(path, cache, window=600, compute=Compute(threads=1)) as llm:
        kv = llm.kv
        assert (kv.heavy, kv.recent, kv.pinned, kv.window) == (40, 40, 10, 600)
        assert (kv.policy, kv.positions) == ("streaming", "dense")


@pytest.mark.parametrize("tokens", [32, 600, TRAINED])
def test_full_cache_evicts_nothing(path: Path, tokens: int) -> None:
    with open_llama(path, FULL_CACHE, window=tokens, compute=Compute(threads=1)) as llm:
        llm.eval([5] * tokens)
        assert llm.kv.compactions == 0
        assert llm.kv.used == tokens
