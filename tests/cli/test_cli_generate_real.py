"""`pyh2o generate` with the tiny model as it is, and the real program, killed and resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

import numpy as np
import pytest

from broken_weights import POLICY, infinite_model
from cli_fakes import (
    ENDLESS,
    PATIENCE,
    Screen,
    run,
    run_program,
    start_program,
    wait_until,
)
from fake_story import (
    names,
    tiny_model,
)
from pyh2o import Llama
from pyh2o.cache.settings import DEFAULT_POLICY
from pyh2o.cli.options import KVType
from pyh2o.core.parameters import KV_TYPES
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


def test_written_tokens_are_exact(tiny: Path) -> None:
    for count in (1, 2, 37):
        output = run("generate", "-m", str(tiny), "-p", "a", "-n", str(count), *ENDLESS)
        assert f"wrote {count} token" in output.notes
        assert "the number of tokens asked for is reached" in output.notes


def test_story_of_a_model_whose_positions_end(tmp_path: Path) -> None:
    short = write_tiny_gguf(
        tmp_path / "short.gguf", seed=17, n_ctx_train=600, arch_variant="learned_positions"
    )
    arguments = ["generate", "-m", str(short), "--hh", "32", "--recent", "32", "--no-loop-guard"]
    output = run(*arguments, "-p", "Once", *ENDLESS)
    assert output.code == 0
    assert "all 600 positions the model was trained for are used up" in output.notes
    output = run(*arguments, "-f", "-", "-o", "s.txt", stdin="word " * 700)
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(r"error: Requested tokens .*\n", output.notes)
    assert not (tmp_path / "s.txt").exists()


def test_story_of_a_model_whose_attention_is_infinite(tmp_path: Path) -> None:
    broken = str(infinite_model(tmp_path / "broken.gguf"))
    cache = ["--hh", "16", "--recent", "16", "--policy", POLICY]
    output = run("generate", "-m", broken, *cache, "-f", "-", stdin="word " * 100)
    assert (output.code, output.text) == (1, "")
    assert re.fullmatch(r"error: the attention of the model is infinite.*\n", output.notes)


def test_story_that_fills_a_full_cache(tiny: Path) -> None:
    output = run(
        "generate",
        "-m",
        str(tiny),
        "-p",
        "x",
        "--ctx",
        "256",
        "--no-evict",
        "--no-loop-guard",
        *ENDLESS,
    )
    assert output.code == 0
    assert "the window of 256 tokens is full, and --no-evict drops nothing" in output.notes


def test_story_that_the_model_may_not_end(tmp_path: Path) -> None:
    """The tiny model as it is draws the end of the text like any other token."""
    path = write_tiny_gguf(tmp_path / "ending.gguf", seed=17)
    arguments = ["generate", "-m", str(path), "-n", "2000", "--temp", "2", "--seed", "1"]
    assert "the model ended its text" in run(*arguments, "-p", "x").notes
    output = run(*arguments, "-p", "x", "--ignore-eos", "-o", "s.txt")
    assert "wrote 2,000 tokens" in output.notes
    output = run(*arguments, "--resume", "-o", "s.txt", "-n", "4000")
    assert "wrote 2,000 tokens" in output.notes


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


def test_every_kv_type(tiny: Path) -> None:
    for kv_type in KVType:
        output = run("generate", "-m", str(tiny), "-p", "x", "-n", "20", "--kv-type", kv_type.value)
        assert output.code == 0, output.notes


def test_loops_are_told_and_end_a_story(tiny: Path, tmp_path: Path) -> None:
    arguments = ["generate", *small(tiny), "-p", "Once upon a time", *ENDLESS, "--no-echo"]
    output = run(*arguments, "-o", "story.txt")
    assert output.code == 0
    *loops, _, last = output.notes.splitlines()
    assert len(loops) > 5
    for line in loops:
        assert re.fullmatch(
            r"a loop of \d+ tokens? at token [\d,]+: the model has to write something else", line
        )
    assert "the model fell into one loop after another" in last
    assert f"broke {len(loops)} loops" in last
    record = json.loads((tmp_path / "story.txt.jsonl").read_text().splitlines()[-1])
    assert (record["loops"], record["finish"]) == (len(loops), "repetition")
    # on stdout, where a line amid the text would belong to it, they come after it
    printed = run(*arguments)
    assert printed.text == (tmp_path / "story.txt").read_text()
    assert printed.notes.splitlines()[:-1] == loops


def open_like(tiny: Path, sampling: Sequence[str]) -> Llama:
    kv_type = KV_TYPES["q8_0" if "q8_0" in sampling else "f16"]
    settings = {"n_ctx": 1024, "hh": 32, "recent": 32, "slack": 8}
    defaults = {"policy": DEFAULT_POLICY, "recall": None}
    return tiny_llama(tiny, type_k=kv_type, type_v=kv_type, **settings, **defaults)


def kill(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGKILL)
    program.communicate(timeout=PATIENCE)
    assert program.returncode == -signal.SIGKILL


@real
@pytest.mark.parametrize(
    "sampling",
    [["--seed", "3", "--temp", "1"], ENDLESS, ["--temp", "0", "--kv-type", "q8_0"]],
    ids=["drawn", "looping", "quantised"],
)
def test_killed_story_goes_on_at_the_exact_token(
    tiny: Path, tmp_path: Path, rng: np.random.Generator, sampling: list[str]
) -> None:
    """kill -9 again and again at random moments: nothing before the last checkpoint is lost."""
    story, records = tmp_path / "story.txt", tmp_path / "story.txt.jsonl"
    begin = ["-p", "Once upon a time", *small(tiny), *sampling]
    llm = open_like(tiny, sampling)
    written = 0
    for _ in range(3):
        arguments = ["--resume"] if written else begin
        program = start_program("generate", *arguments, "-o", story, "--checkpoint", "40")
        wanted = count_lines(records) + int(rng.integers(1, 9))
        wait_until(lambda wanted=wanted: count_lines(records) >= wanted)  # type: ignore[misc]
        with suppress(subprocess.TimeoutExpired):
            program.wait(rng.uniform(0, 0.03))  # between two checkpoints, or amid one
        kill(program)
        saved = Story.load(tmp_path / "story.txt.h2o", llm)
        assert story.read_bytes().startswith(saved.text().encode())
        *_, last = [json.loads(line) for line in records.read_text().splitlines()]
        assert written < last["tokens"] <= saved.written
        written = saved.written
    length = str(written + 100)
    output = run_program("generate", "--resume", "-o", story, "-n", length)
    assert output.code == 0, output.notes
    whole = run_program("generate", *begin, "-o", "whole.txt", "-n", length)
    assert whole.code == 0, whole.notes
    assert story.read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert [name for name in names(tmp_path) if name.endswith((".old", ".tmp"))] == []


def count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@real
def test_ctrl_c_leaves_the_text_and_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    program = start_program(
        "generate", "-m", tiny, "-p", "Once upon", "-o", story, "--no-loop-guard", *ENDLESS
    )
    wait_until(lambda: story.exists() and story.stat().st_size > 100)
    program.send_signal(signal.SIGINT)
    text, notes = program.communicate(timeout=PATIENCE)
    assert (program.returncode, text) == (130, b"")
    written = story.read_text()
    assert written.startswith("Once upon")
    assert len(written) > 100
    lines = notes.decode().splitlines()
    assert lines[0] == f"the text is in {story}"
    assert " · stopped by Ctrl-C · " in lines[1]
    assert lines[2:] == [f"to go on: pyh2o generate --resume --output {quote(str(story))}"]
    n_written = json.loads((tmp_path / "story.txt.jsonl").read_text().splitlines()[-1])["tokens"]
    length = str(n_written + 10)
    assert run_program("generate", "--resume", "-o", story, "-n", length).code == 0
    assert story.read_text().startswith(written)


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
def test_bars_on_a_terminal_only(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 1500)
    arguments = ["generate", "-m", str(tiny), "-f", "long.txt", "-n", "300", "--no-loop-guard"]
    screen = Screen(*arguments, "-o", "story.txt")
    screen.wait_for("reading the prompt")
    screen.wait_for(r"reading.*[\d,]+ of [\d,]+ tokens.* tokens/s.* \d:\d\d:\d\d left")
    screen.wait_for(r"writing.*[\d,]+ of 300 tokens.* tokens/s.* \d:\d\d:\d\d left")
    screen.wait_for("the number of tokens asked for is reached")
    assert screen.end() == 0
    piped = run_program(*arguments)
    assert piped.code == 0
    assert piped.notes.count("\n") == 1
    assert "\x1b" not in piped.notes + piped.text
