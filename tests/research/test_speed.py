"""Caches whose speed is compared, and a whole comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from measured import rows_of
from research.eval.caches import Compute
from research.speed import __main__ as program
from research.speed.caches import Comparison, caches_to_compare
from research.speed.openvino import eviction_parts

ASKED = Comparison(
    model=Path("tiny.gguf"),
    window=512,
    compute=Compute(threads=1),
    histories=(0, 300),
    budgets=(0.2, 64),
    kv_types=("f16", "q8_0"),
    rounds=3,
    n=4,
)


def test_caches() -> None:
    caches = {cache.name: cache for cache in caches_to_compare(ASKED)}
    assert list(caches) == [
        *("full", "full, flash attention", "full, q8_0"),
        *("20 %", "20 %, q8_0", "64 rows", "64 rows, q8_0"),
        *("sinks + window, 20 %", "sinks + window, 64 rows"),
        *("full at 102 rows", "full at 102 rows, flash attention"),
        *("full at 64 rows", "full at 64 rows, flash attention"),
    ]
    assert [name for name, one in caches.items() if one.is_full] == list(caches)[:2]
    assert [one.text for one in caches.values()] == [None] * 9 + [102, 102, 64, 64]

    def parts(name: str) -> list[int]:
        return [caches[name].settings[part] for part in ("hh", "recent", "pinned", "recall")]

    assert parts("64 rows") == [32, 32, 0, 8]
    assert parts("sinks + window, 64 rows") == [30, 30, 4, 0]
    assert caches["64 rows"].settings["n_ctx"] == 512
    assert {caches[name].settings["n_ctx"] for name in list(caches)[:3]} == {512}


def test_policies_and_recall_are_compared_at_equal_rows() -> None:
    asked = replace(
        ASKED, budgets=(0.2,), kv_types=("f16",), policies=("h2o", "snap"), recalls=(0, 32)
    )
    caches = {cache.name: cache.settings for cache in caches_to_compare(asked)}
    names = list(caches)[2:7]
    assert names == [
        *("h2o, 20 %, no recall", "snap, 20 %, no recall"),
        *("h2o, 20 %, recall 32 rows", "snap, 20 %, recall 32 rows"),
        "sinks + window, 20 %",
    ]
    assert [caches[name]["policy"] for name in names] == ["h2o", "snap", "h2o", "snap", "streaming"]
    assert caches[names[2]] == {**caches[names[0]], "recall": 32}
    assert "full at 102 rows" in caches


def test_whole_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "bytes_per_second", lambda threads: 10e9)
    target = tmp_path / "b.json"
    arguments = ["-m", str(path), "--threads", "1", "--history", "300,0", "--recall", "0,32"]
    arguments += ["--budget", "0.2", "--kv-type", "f16", "--rounds", "3", "-n", "4"]
    program.main([*arguments, "--json", str(target)])
    shown = capsys.readouterr().out
    text = target.read_text()
    assert str(tmp_path) not in text
    data = json.loads(text)
    names = ["full", "full, flash attention", "20 %, no recall", "20 %, recall 32 rows"]
    names += ["sinks + window, 20 %"]
    at_equal_rows = ["full at 204 rows", "full at 204 rows, flash attention"]
    assert [row[0] for row in rows_of(shown)] == names + names + at_equal_rows
    for result in data["histories"]:
        best = max(result["figures"][:2], key=lambda one: one["generated_per_second"]["median"])
        assert best["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert result["figures"][0]["share_of_full"] == 1.0  # a window of 1024
        for figures in result["figures"]:
            assert figures["roofline"] > 0
            assert figures["done"]["peak_bytes"] > figures["done"]["use"]["bytes_kv"]
    (_, last) = data["histories"]
    assert (last["history"], last["figures"][-1]["done"]["position"]) == (300, 204 + 12)


@pytest.mark.parametrize(("rows", "parts"), [(96, (32, 32, 96)), (1638, (32, 800, 1632))])
def test_openvino_gets_the_budget_in_whole_blocks(rows: int, parts: tuple[int, int, int]) -> None:
    assert eviction_parts(rows) == parts
