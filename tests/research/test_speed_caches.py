"""The caches whose speed is compared, and the settings of a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyh2o.errors import SettingsError
from research.eval.caches import Compute
from research.speed.caches import BenchSettings, caches_to_compare, default_histories

TRAINED = 512
SETTINGS = BenchSettings(
    model=Path("tiny.gguf"),
    window=TRAINED,
    compute=Compute(threads=1),
    histories=(0, 300),
    budgets=(0.2, 64),
    kv_types=("f16", "q8_0"),
    rounds=3,
    n=4,
)


def test_caches() -> None:
    caches = caches_to_compare(SETTINGS, TRAINED)
    assert [(cache.name, cache.rows, cache.cells) for cache in caches] == [
        ("full", 0, 512),
        ("full, flash attention", 0, 512),
        ("full, q8_0", 0, 512),
        ("20 %", 102, 256),
        ("20 %, q8_0", 102, 256),
        ("64 rows", 64, 256),
        ("64 rows, q8_0", 64, 256),
        ("sinks + window, 20 %", 102, 256),
        ("sinks + window, 64 rows", 64, 256),
        ("full at 102 rows", 0, 256),
        ("full at 102 rows, flash attention", 0, 256),
        ("full at 64 rows", 0, 256),
        ("full at 64 rows, flash attention", 0, 256),
    ]
    by_name = {cache.name: cache for cache in caches}
    assert [cache.name for cache in caches if cache.is_stock] == ["full", "full, flash attention"]
    half = by_name["64 rows"]
    assert (half.heavy, half.recent, half.pinned, half.recall) == (32, 32, 0, 8)
    sinks = by_name["sinks + window, 64 rows"]
    assert (sinks.heavy, sinks.recent, sinks.pinned, sinks.recall) == (30, 30, 4, 0)


def test_stock_modes_at_equal_cells_take_part_once_with_a_short_text() -> None:
    caches = {cache.name: cache for cache in caches_to_compare(SETTINGS, TRAINED)}
    equal = caches["full at 64 rows"]
    assert [equal.takes_part(history, 300) for history in (0, 300)] == [False, True]
    assert equal.target(300) == 64
    assert caches["full"].target(300) == 300


def test_budget_larger_than_the_text_has_no_equal_cells() -> None:
    short = replace(SETTINGS, histories=(0, 100))
    names = [cache.name for cache in caches_to_compare(short, TRAINED)]
    assert "full at 64 rows" in names
    assert "full at 102 rows" not in names


@pytest.mark.parametrize(("longest", "cells"), [(20, 2048), (2048, 2304), (5000, 5120)])
def test_full_caches_have_room_for_the_window_and_the_text(longest: int, cells: int) -> None:
    """However short the text is: a budget is a part of the window, and so is its cache."""
    settings = replace(SETTINGS, window=2048, histories=(longest,))
    caches = caches_to_compare(settings, 2048)
    full = [cache for cache in caches if cache.is_full and cache.text is None]
    assert [cache.cells for cache in full] == [cells] * 3
    assert all(cache.cells < cells for cache in caches if not cache.is_full)


def test_policies_are_compared_at_each_budget() -> None:
    settings = replace(SETTINGS, budgets=(64,), kv_types=("f16",), policies=("h2o", "tova"))
    caches = {cache.name: cache.policy for cache in caches_to_compare(settings, TRAINED)}
    assert caches["h2o, 64 rows"] == "h2o"
    assert caches["tova, 64 rows"] == "tova"
    # a window of its own needs no scores
    assert caches["sinks + window, 64 rows"] == "streaming"


def test_recall_is_compared_at_equal_rows() -> None:
    settings = replace(
        SETTINGS, budgets=(0.2, 134), kv_types=("f16",), recalls=(0, 32, 0.125), histories=(300,)
    )
    caches = caches_to_compare(settings, TRAINED)
    evicting = [one for one in caches if one.kind == "evicting" and not one.is_streaming]
    assert [(cache.name, cache.rows, cache.recall) for cache in evicting] == [
        ("20 %, no recall", 102, 0),
        ("20 %, recall 32 rows", 102, 32),
        ("20 %, recall 12.5 %", 102, 64),
        ("134 rows, no recall", 134, 0),
        ("134 rows, recall 32 rows", 134, 32),
        ("134 rows, recall 12.5 %", 134, 64),
    ]
    assert evicting[1].eviction() == {**evicting[0].eviction(), "recall": 32}
    # the others are those of the budgets, each once
    names = [cache.name for cache in caches if cache not in evicting]
    assert names[2:4] == ["sinks + window, 20 %", "sinks + window, 134 rows"]
    assert "full at 134 rows" in names
    assert len(names) == len(set(names))
    assert not any("recall" in name for name in names)


def test_budget_of_the_whole_window_has_fewer_heavy_rows() -> None:
    """For its slack there are no positions left."""
    trained = 2048
    for recall in (0, 512):
        settings = replace(SETTINGS, window=trained, budgets=(1.0,), recalls=(recall,))
        caches = caches_to_compare(replace(settings, kv_types=("f16",)), trained)
        cache, sinks = (one for one in caches if one.kind == "evicting")
        assert (cache.recent, cache.recall) == (1024, recall)
        assert cache.heavy + cache.recent == cache.rows
        # what is found needs none
        assert (cache.rows < trained) == (recall == 0)
        assert sinks.rows < trained


def test_types_of_caches_that_recall() -> None:
    settings = replace(SETTINGS, budgets=(64,), recalls=(32,), policies=("h2o",))
    caches = {one.name: one for one in caches_to_compare(settings, TRAINED)}
    assert caches["h2o, 64 rows, recall 32 rows, q8_0"].recall == 32
    assert "h2o, 64 rows" not in caches


def test_caches_of_transformers_and_kvpress() -> None:
    settings = replace(SETTINGS, transformers=True)
    stock = caches_to_compare(settings, TRAINED)
    both = caches_to_compare(settings, TRAINED, kvpress=True)
    assert [cache.kind for cache in stock[13:]] == ["transformers"]
    assert [(cache.kind, cache.rows) for cache in both[14:]] == [("kvpress", 102), ("kvpress", 64)]


def test_caches_of_openvino_have_room_for_a_whole_text() -> None:
    caches = caches_to_compare(replace(SETTINGS, openvino=True), TRAINED)
    assert [(cache.name, cache.kind, cache.rows, cache.cells) for cache in caches[13:]] == [
        ("openvino", "openvino", 0, 512),
        ("openvino, 20 %", "openvino", 102, 512),
        ("openvino, 64 rows", "openvino", 64, 512),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"histories": ()}, "at least one --history"),
        ({"histories": (-1,)}, "give 0 or more tokens"),
        ({"kv_types": ("f16", "q3_0")}, "no KV type 'q3_0'"),
        ({"histories": (4, 16)}, "4 and 16 are too close: 12 tokens"),
    ],
)
def test_refused_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(SETTINGS, **change)


def test_recall_that_leaves_no_row_in_the_cache() -> None:
    settings = replace(SETTINGS, budgets=(0.5,), recalls=(0.6,))
    with pytest.raises(SettingsError, match=r"--recall 0.6 is 307 of the 256 rows of --budget 0.5"):
        caches_to_compare(settings, TRAINED)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1.5, "1.5 is more than the window"),
        (513, "513 is more than the window of 512"),
        (3, "no room for 4"),
    ],
)
def test_refused_budgets(budget: float, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        caches_to_compare(replace(SETTINGS, budgets=(budget,)), TRAINED)


def test_histories_that_are_just_far_enough_apart() -> None:
    assert replace(SETTINGS, histories=(0, 4, 17)).text_tokens == 17 + 12


def test_default_histories_fit_the_window() -> None:
    assert default_histories(131072, 160) == (0, 4096, 8192)
    assert default_histories(2048, 160) == (0, 1024, 2048)
    assert default_histories(256, 160) == (0, 256)
