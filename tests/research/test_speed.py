"""Caches whose speed is compared, and a whole comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from measured import rows_of
from research.speed import __main__ as program


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
