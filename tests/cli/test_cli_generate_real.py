"""`pyh2o generate` with the tiny model, and as a real program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_fakes import (
    ENDLESS,
    PATIENCE,
    Screen,
    run,
    start_program,
)
from fake_story import (
    tiny_model,
)
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")


real = pytest.mark.real


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def small(tiny: Path) -> list[str]:
    """Options for the tiny model and a small cache."""
    return ["-m", str(tiny), "--ctx", "1024", "--hh", "32", "--recent", "32", "--slack", "8"]


def test_the_same_seed_gives_the_same_story(tiny: Path, tmp_path: Path) -> None:
    arguments = ["generate", "-p", "Once upon a time", *small(tiny), "-n", "300", "--seed", "3"]
    printed = run(*arguments)
    written = run(*arguments, "-o", "story.txt")
    assert (printed.code, written.code, written.text) == (0, 0, "")
    assert printed.text.startswith("Once upon a time")
    assert (tmp_path / "story.txt").read_bytes().decode() == printed.text
    assert re.search(r" [1-9]\d* evicted", printed.notes)


def test_end_of_text_tokens_can_be_ignored(tmp_path: Path) -> None:
    """The tiny model samples the end of the text like any other token."""
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
    assert exact.text != plain.text
    assert "KV 59/64 cells" in exact.notes
    refused = run(*arguments, "--prefill", "exact", "--prefill-mib", "1", stdin="word " * 2000)
    assert (refused.code, refused.text) == (1, "")
    assert re.fullmatch(r"error: an exact prefill of .* the 1 that prefill_mib .*\n", refused.notes)


@real
def test_a_closed_pipe_ends_the_program(tiny: Path) -> None:
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
    screen.wait_for("the maximum number of tokens is reached")
    assert screen.end() == 0
