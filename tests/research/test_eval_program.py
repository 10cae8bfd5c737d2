"""`python -m research.eval`: whole runs on a tiny model, gone on with, and refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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


def test_program_of_the_checkout_runs_the_installed_package(path: Path) -> None:
    """Whose library is compiled."""
    given = ["-m", str(path), "--text", str(Path("a.txt").absolute()), *COMMANDS["fidelity"][2:]]
    done = subprocess.run(
        [sys.executable, "-m", "research.eval", "fidelity", *given],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": ""},  # which would hide the checkout
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "**a.txt, 400 tokens, over those from 100 on**" in done.stdout


def test_package_does_not_import_research() -> None:
    files = [path for folder in ("pyh2o", "cli") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        assert not re.search(r"^\s*(from|import) research\b", path.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fidelity", "--text", "none.txt"], "none.txt"),
        (["fidelity", "--text", "a.txt", "--policy", "h3o"], "unknown policy 'h3o'"),
        (["fidelity", "--text", "a.txt", "--positions", "x"], "--positions x: give some of"),
        (["fidelity", "--text", "a.txt", "--json", "no/b.json"], "there is no folder"),
        (["recall", "--question", "never"], "--question never: give some of before, after"),
        (["story", "--prompt", "", "--json", "a.txt"], "is no file of this measurement"),
    ],
)
def test_refusals(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "-m", str(path)])
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert message in said.err
    assert said.out == ""
