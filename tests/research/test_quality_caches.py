"""The caches whose quality is compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from measured import TRAINED
from research.eval.caches import FULL_CACHE, Compute, MeasuredCache, open_llama
from research.eval.measurement import CacheSettings


def test_parts_of_a_budget() -> None:
    settings = CacheSettings(("snap:queries=8", "full"), (100,), 0.3, pinned=10)
    _, cache = settings.for_text(600)
    assert (cache.pinned, cache.heavy, cache.recent) == (10, 63, 27)
    assert (cache.rows, cache.recall) == (100, 11)
    assert cache.name == "snap:queries=8, 100 rows"
    all_recent = replace(settings, recent_share=1.0)
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


def test_opened_caches_keep_what_they_say(path: Path) -> None:
    cache = MeasuredCache(
        "a",
        policy="streaming",
        rows=90,
        heavy=40,
        recent=40,
        pinned=10,
        recall=16,
    )
    with open_llama(path, cache, window=600, compute=Compute(threads=1)) as llm:
        kv = llm.kv
        assert (kv.heavy, kv.recent, kv.pinned, kv.window) == (24, 40, 10, 600)
        assert kv.limits.recall == 16
        assert kv.policy == "streaming"


@pytest.mark.parametrize("tokens", [32, TRAINED])
def test_full_cache_evicts_nothing(path: Path, tokens: int) -> None:
    with open_llama(path, FULL_CACHE, window=tokens, compute=Compute(threads=1)) as llm:
        llm.eval([5] * tokens)
        assert llm.kv.compactions == 0
        assert llm.kv.used == tokens
