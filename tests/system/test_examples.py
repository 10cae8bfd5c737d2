"""The examples run unchanged and report missing models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, seed=4, n_ctx_train=2048, chat_template=CHAT_TEMPLATE)


def run(name: str, *arguments: str | Path, folder: Path, given: str = "") -> str:
    """Return what an example prints, or its error."""
    [script] = [each for each in EXAMPLES if each.stem == name]
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=folder,
        # No demo model is there. One thread: more would wait for each other.
        env={**os.environ, "PYH2O_MODELS": str(folder), "OMP_NUM_THREADS": "1"},
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return done.stderr
    assert done.stderr == ""
    return done.stdout


def test_there_are_three_examples() -> None:
    assert [path.stem for path in EXAMPLES] == ["chat", "story", "what_stays"]
    for path in EXAMPLES:
        lines = path.read_text().splitlines()
        assert len(lines) < 40
        assert f"    python examples/{path.name} [MODEL.gguf" in lines[2]


@pytest.mark.parametrize("name", ["chat", "story", "what_stays"])
def test_a_missing_model_is_reported_first(name: str, tmp_path: Path) -> None:
    error = run(name, folder=tmp_path)
    assert error.startswith("no such model")
    assert error.endswith("run `pyh2o models fetch`, or give a GGUF file\n")
    assert error.count("\n") == 1


def test_chat_example_answers(model: Path, tmp_path: Path) -> None:
    shown = run("chat", model, folder=tmp_path, given="Hello?\nAnd then?\n\nnot read\n")
    assert shown.startswith("tiny: type a message\n")
    assert shown.count("[KV ") == 2


def test_story_example_resumes(model: Path, tmp_path: Path) -> None:
    first = run("story", model, "30", "tale.story", folder=tmp_path)
    assert first.startswith("Once upon a time, at the sea,")
    assert "[30 tokens in tale.story" in first
    second = run("story", model, "20", "tale.story", folder=tmp_path)
    assert second.startswith("resuming tale.story after ")
    assert "[50 tokens in tale.story" in second


def test_kept_rows_example_prints_them(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a window. " * 100)
    for arguments in ([model], [model, text]):
        shown = run("what_stays", *arguments, folder=tmp_path)
        assert shown.startswith("KV ")
        assert "0 evicted" not in shown.splitlines()[0]
        scores = [float(line.split()[0]) for line in shown.splitlines() if "  at " in line]
        assert len(scores) == 10
        assert scores[0] > 0
        assert scores == sorted(scores, reverse=True)
        assert "head 0: " in shown
