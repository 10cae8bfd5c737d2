"""`pyh2o generate` with the tiny model as it is, and the real program, killed and resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from cli_fakes import (
    ENDLESS,
    PATIENCE,
    Screen,
    run,
    start_program,
    wait_until,
)
from fake_story import (
    names,
    tiny_model,
)
from pyh2o.cache.settings import DEFAULT_POLICY
from pyh2o.sessions.story import Story
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("surroundings")


real = pytest.mark.real


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def small(tiny: Path) -> list[str]:
    """Options for the tiny model and a small cache."""
    return ["-m", str(tiny), "--ctx", "1024", "--hh", "32", "--recent", "32", "--slack", "8"]


def test_same_seed_same_story(tiny: Path, tmp_path: Path) -> None:
    arguments = ["generate", "-p", "Once upon a time", *small(tiny), "-n", "300", "--seed", "3"]
    printed = run(*arguments)
    written = run(*arguments, "-o", "story.txt")
    assert (printed.code, written.code, written.text) == (0, 0, "")
    assert printed.text.startswith("Once upon a time")
    assert (tmp_path / "story.txt").read_bytes().decode() == printed.text
    assert re.search(r" [1-9]\d* evicted", printed.notes)


def test_story_that_the_model_may_not_end(tmp_path: Path) -> None:
    """The tiny model as it is draws the end of the text like any other token."""
    path = write_tiny_gguf(tmp_path / "ending.gguf", seed=17)
    arguments = ["generate", "-m", str(path), "--temp", "2", "--seed", "3"]
    assert "the model ended its text" in run(*arguments, "-p", "x", "-n", "150").notes
    output = run(*arguments, "-p", "x", "--ignore-eos", "-o", "s.txt", "-n", "150")
    assert "wrote 150 tokens" in output.notes
    output = run(*arguments, "--resume", "-o", "s.txt", "-n", "300")
    assert "wrote 150 tokens" in output.notes


def test_a_long_prompt_can_be_read_exactly(tiny: Path) -> None:
    arguments = ["generate", *small(tiny), "-f", "-", "-n", "20", "--seed", "3", *ENDLESS]
    prompt = "word " * 150
    plain = run(*arguments, stdin=prompt)
    exact = run(*arguments, "--prefill", "exact", stdin=prompt)
    assert (plain.code, exact.code) == (0, 0)
    said = re.search(r"^reading ([\d,]+) tokens in full takes [1-9]\d* MiB", exact.notes, re.M)
    assert said is not None
    assert "in full" not in plain.notes
    n_read = re.search(r"read ([\d,]+) tokens at", exact.notes)
    assert n_read is not None
    assert n_read[1] == said[1]
    assert "KV 59/64 cells" in exact.notes
    refused = run(*arguments, "--prefill", "exact", "--prefill-mib", "1", stdin="word " * 2000)
    assert (refused.code, refused.text) == (1, "")
    assert re.fullmatch(r"error: an exact prefill of .* 1 allowed: .*\n", refused.notes)


@real
def test_killed_story_goes_on_at_the_exact_token(
    tiny: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """kill -9 again and again at random moments: nothing before the last checkpoint is lost."""
    story, records = tmp_path / "story.txt", tmp_path / "story.txt.jsonl"
    begin = ["-p", "Once upon a time", *small(tiny), "--seed", "3", "--temp", "1"]
    settings = {"n_ctx": 1024, "hh": 32, "recent": 32, "slack": 8}
    llm = tiny_llama(tiny, **settings, policy=DEFAULT_POLICY, recall=None)
    written = 0
    for _ in range(2):
        arguments = ["--resume"] if written else begin
        program = start_program("generate", *arguments, "-o", story, "--checkpoint", "40")
        wanted = count_lines(records) + int(rng.integers(1, 9))
        wait_until(lambda wanted=wanted: count_lines(records) >= wanted)  # type: ignore[misc]
        with suppress(subprocess.TimeoutExpired):
            program.wait(rng.uniform(0, 0.03))  # between two checkpoints, or amid one
        program.kill()
        program.communicate(timeout=PATIENCE)
        assert program.returncode == -signal.SIGKILL
        saved = Story.load(tmp_path / "story.txt.h2o", llm)
        assert story.read_bytes().startswith(saved.text().encode())
        *_, last = [json.loads(line) for line in records.read_text().splitlines()]
        assert written < last["tokens"] <= saved.written
        written = saved.written
    length = str(written + 100)
    output = run("generate", "--resume", "-o", str(story), "-n", length)
    assert output.code == 0, output.notes
    whole = run("generate", *begin, "-o", "whole.txt", "-n", length)
    assert whole.code == 0, whole.notes
    assert story.read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert [name for name in names(tmp_path) if name.endswith((".old", ".tmp"))] == []


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@real
def test_reader_that_leaves_early(tiny: Path) -> None:
    program = start_program("generate", "-m", tiny, "-p", "Once upon", "--no-loop-guard", *ENDLESS)
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.read(9) == b"Once upon"
    program.stdout.close()
    assert program.wait(timeout=PATIENCE) == 141
    assert program.stderr.read() == b""
    program.stderr.close()


@real
def test_bars_on_a_terminal(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 1000)
    arguments = ["generate", "-m", str(tiny), "-f", "long.txt", "-n", "300", "--no-loop-guard"]
    screen = Screen(*arguments, "-o", "story.txt")
    screen.wait_for("reading the prompt")
    screen.wait_for(r"[\d,]+ of [\d,]+ tokens.*\d:\d\d:\d\d")
    screen.wait_for(r"writing.*[\d,]+ of 300 tokens.*\d:\d\d:\d\d")
    screen.wait_for("the number of tokens asked for is reached")
    assert screen.end() == 0
