"""`pyh2o models recommend`: what it prints, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_fakes import run
from pyh2o.models import recommended

pytestmark = pytest.mark.usefixtures("surroundings")


def with_memory(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(recommended, "discrete_gpus", list)
    monkeypatch.setattr(recommended, "available_bytes", lambda: n_bytes)
    monkeypatch.setattr(recommended, "_bandwidth", lambda: 34.9e9)


def test_one_is_marked_and_those_that_do_not_fit_come_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_memory(monkeypatch, 8 * 10**9)
    output = run("models", "recommend", "--json", "found.json")
    assert (output.code, output.notes) == (0, "")
    first, headings, *lines = output.text.splitlines()
    assert first == (
        "8.0 GB free of main memory, read at 34.9 GB/s; for a window of 32,768 tokens:"
    )
    assert headings.split() == ["file", "full", "KV", "our", "KV", "in", "all", "tok/s"]
    row = "Qwen/Qwen3-8B-GGUF                         5.0 GB  4.8 GB 913 MB  7.0 GB   5.9"
    assert [line for line in lines if line.startswith(">")] == [f"> {row}"]
    assert lines.index("too large:") == lines.index(f"> {row}") + 1
    assert lines[-1] == "the choice: pyh2o models fetch Qwen/Qwen3-8B-GGUF"
    assert max(map(len, lines)) <= 80
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["choice"], record["memory_bytes"]) == ("Qwen/Qwen3-8B-GGUF", 8 * 10**9)
    assert run("models", "recommend", "--json", "found.json").code == 1


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 10**9)
    output = run("models", "recommend")
    assert output.code == 0
    assert ">" not in output.text
    assert output.text.splitlines()[-1].startswith("none of these fits: `pyh2o models fetch`")
