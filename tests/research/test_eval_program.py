"""`python -m research.eval`: whole runs on a tiny model, resumed from their files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from compiled import ROOT
from measured import rows_of
from pyh2o.cache.settings import DEFAULT_POLICY
from research.eval.__main__ import main

COMMANDS = {
    "fidelity": ["--text", "a.txt", "--tokens", "400", "--budget", "100"],
    "recall": ["--task", "fwe", "--tokens", "700", "--samples", "1", "--budget", "100"],
    "story": ["--tokens", "40", "--samples", "2", "--budget", "30"],
}


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentences = [f"Sentence {i} speaks of {i * 7919 % 97} birds." for i in range(200)]
    Path("a.txt").write_text("\n\n".join(sentences))


@pytest.mark.parametrize("command", COMMANDS)
def test_whole_run_and_the_same_again(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    given = [command, "-m", str(path), "--threads", "1", *COMMANDS[command], "--json", "b.json"]
    main(given)
    shown = capsys.readouterr().out
    content = Path("b.json").read_text()
    data = json.loads(content)
    assert data["kind"] == command
    assert str(tmp_path) not in content
    assert data["basis"]["--model"].startswith("tiny.gguf (")
    caches = {row[0].split(",")[0] for row in rows_of(shown)}
    assert caches == {"full", DEFAULT_POLICY, "streaming"}
    assert {unit["cache"].split(",")[0] for unit in data["units"].values()} == caches
    main(given)
    assert capsys.readouterr().out == shown
    assert Path("b.json").read_text() == content


def test_package_does_not_import_research() -> None:
    files = [path for folder in ("pyh2o", "cli") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        assert not re.search(r"^\s*(from|import) research\b", path.read_text("utf-8"), re.MULTILINE)
