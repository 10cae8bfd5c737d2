"""`pyh2o generate --count`: stories written at once, each as if it were alone."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from cli_fakes import PATIENCE, Screen, run, run_program, start_program, wait_until
from fake_story import names, now_there, tiny_model
from full_disk import full_disk
from pyh2o.cli import loading
from pyh2o.sessions.session_file import read_session, write_session

pytestmark = pytest.mark.usefixtures("surroundings")

real = pytest.mark.real


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def small(tiny: Path) -> list[str]:
    """Options for the tiny model and a small cache."""
    cache = ["--ctx", "1024", "--hh", "32", "--recent", "32", "--slack", "8", "--kv-type", "f32"]
    return ["-m", str(tiny), *cache, "--threads", "1"]


def beginning(tiny: Path, *, seed: int = 3) -> list[str]:
    return ["generate", "-p", "Once upon a time", *small(tiny), "--seed", str(seed)]


def files(n: int) -> list[str]:
    """Names of the files of so many stories."""
    suffixes = ("", ".h2o", ".h2o.archive", ".jsonl")
    return [f"story-{i:02}.txt{suffix}" for i in range(1, n + 1) for suffix in suffixes]


def text(i: int) -> str:
    return Path(f"story-{i:02}.txt").read_text()


@pytest.mark.parametrize(("places", "recall"), [([], "0"), (["--texts", "2"], "24")])
def test_each_is_the_story_that_is_written_alone(
    tiny: Path, tmp_path: Path, places: list[str], recall: str
) -> None:
    arguments = ["-n", "100", "--recall", recall]
    output = run(*beginning(tiny), *arguments, "-o", "story.txt", "--count", "3", *places)
    assert (output.code, output.text) == (0, "")
    *lines, last = output.notes.splitlines()
    for i in range(1, 4):
        [line] = [line for line in lines if line.startswith(f"story-{i:02}.txt: wrote 100 tokens")]
        assert line.endswith(f" · the number of tokens asked for is reached · seed {2 + i}")
    n_places = 2 if places else 3
    assert re.fullmatch(
        rf"3 texts · wrote 300 tokens at [\d.]+ tokens/s · KV {n_places} x [\d.]+ MiB", last
    )
    with_archives = recall != "0"
    expected = [name for name in files(3) if with_archives or not name.endswith(".archive")]
    assert names(tmp_path) == expected
    # and going on with all of them is going on with each
    going_on = ["generate", "--resume", "-n", "130"]
    assert run(*going_on, "-o", "story.txt", "--count", "3", *places).code == 0
    for i in range(1, 4):
        alone = [*beginning(tiny, seed=2 + i), *arguments, "-o", f"alone-{i}.txt"]
        assert run(*alone).code == 0
        assert run(*going_on, "-o", f"alone-{i}.txt").code == 0
        assert text(i) == Path(f"alone-{i}.txt").read_text()


def test_records_and_checkpoints_of_each(tiny: Path) -> None:
    arguments = ["-n", "50", "--checkpoint", "20", "-o", "story.txt", "--count", "2"]
    assert run(*beginning(tiny), *arguments).code == 0
    for i in (1, 2):
        lines = Path(f"story-{i:02}.txt.jsonl").read_text().splitlines()
        assert [json.loads(line)["tokens"] for line in lines] == [1, 20, 40, 50]


def test_existing_stories_are_replaced_where_that_was_asked_for(tiny: Path, tmp_path: Path) -> None:
    arguments = ["-n", "20", "-o", "story.txt", "--count", "2"]
    assert run(*beginning(tiny, seed=9), *arguments).code == 0
    earlier = text(1)
    assert run(*beginning(tiny), *arguments).code == 1
    assert text(1) == earlier
    assert run(*beginning(tiny), *arguments, "--force").code == 0
    assert text(1) != earlier
    assert names(tmp_path) == files(2)


def test_one_of_one(tiny: Path, tmp_path: Path) -> None:
    assert run(*beginning(tiny), "-n", "5", "-o", "story.txt", "--count", "1").code == 0
    assert names(tmp_path) == files(1)


def test_loops_are_told_of_each(tiny: Path) -> None:
    likeliest = ["--temp", "0", "--repeat-penalty", "1"]
    output = run(*beginning(tiny), *likeliest, "-o", "story.txt", "--count", "2")
    assert output.code == 0
    for i in (1, 2):
        assert f"story-{i:02}.txt: a loop of " in output.notes
    assert output.notes.count("the model fell into one loop after another") == 2


# -------------------------------------------------------------------------------------------------
# What is refused
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--count", "2"], 2, "--count needs --output FILE"),
        (["-o", "story.txt", "--texts", "2"], 2, "--texts is for the stories of --count"),
        (["-o", "story.txt", "--count", "2"], 1, "error: story-02.txt exists: give another --outp"),
        (["-o", "none/s.txt", "--count", "2"], 1, "error: there is no folder"),
        (["-o", "gone.txt", "--count", "2"], 1, "error: gone-01.txt is not a file"),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.delattr(loading, "load_engine")
    (tmp_path / "story-02.txt").write_text("mine")
    (tmp_path / "gone-01.txt").symlink_to("/dev/null")
    output = run("generate", "-p", "x", *arguments)
    assert (output.code, output.text) == (code, "")
    assert message in output.notes
    assert names(tmp_path) == ["gone-01.txt", "story-02.txt"]


def test_the_prompt_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loading, "load_engine")
    (tmp_path / "story-02.txt").write_text("Once")
    arguments = ["-f", "story-02.txt", "--no-echo", "--force", "-o", "story.txt", "--count", "2"]
    output = run("generate", *arguments)
    assert output.notes == (
        "error: --no-echo would lose the prompt in story-02.txt: give another --output\n"
    )
    assert (tmp_path / "story-02.txt").read_text() == "Once"


def test_the_model_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(loading, "load_engine")
    (tmp_path / "m-02.gguf").write_text("weights")
    arguments = ["-p", "x", "-m", "m-02.gguf", "-o", "m.gguf", "--force", "--count", "2"]
    assert "m-02.gguf is the model: give another --output\n" in run("generate", *arguments).notes
    assert (tmp_path / "m-02.gguf").read_text() == "weights"


def test_an_exact_prefill_is_refused(tiny: Path, tmp_path: Path) -> None:
    output = run(*beginning(tiny), "-o", "s.txt", "--count", "2", "--prefill", "exact")
    assert output.code == 1
    assert output.notes.startswith("error: prefill='exact' takes a larger cache for all texts")
    assert names(tmp_path) == []


def test_a_prompt_that_is_too_long_leaves_no_files(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 400)
    arguments = ["-f", "long.txt", "-m", str(tiny), "--ctx", "512", "--no-evict"]
    output = run("generate", *arguments, "-o", "story.txt", "--count", "2")
    assert output.code == 1
    assert names(tmp_path) == ["long.txt"]


def test_a_story_that_is_missing_is_told(tiny: Path, tmp_path: Path) -> None:
    assert run(*beginning(tiny), "-n", "5", "-o", "story.txt", "--count", "2").code == 0
    there = now_there()
    output = run("generate", "--resume", "-n", "9", "-o", "story.txt", "--count", "3")
    assert output.code == 1
    assert output.notes == (
        "error: there is no checkpoint story-03.txt.h2o: start without --resume\n"
    )
    assert now_there() == there


# -------------------------------------------------------------------------------------------------
# Broken off, and gone on with
# -------------------------------------------------------------------------------------------------


def n_written(i: int) -> int:
    """Tokens that a story has at its last record."""
    lines = Path(f"story-{i:02}.txt.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["tokens"])


@real
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_all_go_on_where_they_were(tiny: Path, tmp_path: Path, ending: signal.Signals) -> None:
    """Also those that had not begun: two places for four stories."""
    arguments = ["-o", "story.txt", "--count", "4", "--texts", "2"]
    many = [*beginning(tiny), "--no-loop-guard", "--checkpoint", "50", *arguments]
    program = start_program(*many, "-n", "100000")
    wait_until(lambda: all(Path(f"story-{i:02}.txt.jsonl").exists() for i in (1, 2)))
    program.send_signal(ending)
    _, notes = program.communicate(timeout=PATIENCE)
    there = names(tmp_path)
    assert {f"story-{i:02}.txt{end}" for i in range(1, 5) for end in ("", ".h2o")} <= {*there}
    assert not text(4)
    if ending == signal.SIGINT:
        assert program.returncode == 130
        *lines, last, how = notes.decode().splitlines()
        assert how == (
            "to go on: pyh2o generate --resume --output story.txt --count 4 --texts 2 --threads 1"
        )
        assert last.startswith("4 texts · wrote ")
        assert [line.split(":")[0] for line in sorted(lines)] == ["story-01.txt", "story-02.txt"]
        assert all(" · stopped by Ctrl-C · " in line for line in lines)
    length = str(max(n_written(1), n_written(2)) + 60)
    output = run_program("generate", "--resume", *arguments, "-n", length)
    assert output.code == 0, output.notes
    assert names(tmp_path) == files(4)
    whole = ["-n", length, "-o", "whole.txt", "--count", "4"]
    assert run(*beginning(tiny), "--no-loop-guard", *whole).code == 0
    for i in range(1, 5):
        assert text(i) == Path(f"whole-{i:02}.txt").read_text()


def set_finish(i: int, finish: str | None) -> None:
    """Let the checkpoint of a story say so."""
    session = read_session(f"story-{i:02}.txt.h2o", "story")
    session.header["story"]["finish"] = finish
    write_session(f"story-{i:02}.txt.h2o", session)


def test_where_one_was_cut_off_those_that_had_ended_stay(tiny: Path) -> None:
    assert run(*beginning(tiny), "-n", "60", "-o", "story.txt", "--count", "2").code == 0
    going_on = ["generate", "--resume", "-o", "story.txt", "--count", "2", "-n"]
    set_finish(1, "stop")
    set_finish(2, None)
    before = text(1)
    output = run(*going_on, "90")
    assert output.code == 0
    first, second, last = output.notes.splitlines()
    assert first == "story-01.txt has come to its end, and stays as it is"
    assert second.startswith("story-02.txt: wrote 30 tokens")
    assert last.startswith("1 text · wrote 30 tokens")
    assert (n_written(1), n_written(2)) == (60, 90)
    assert text(1) == before
    # where all have ended, it was meant for all
    output = run(*going_on, "120")
    assert output.code == 0
    assert (n_written(1), n_written(2)) == (120, 120)
    # and what has its length is left alone
    there = now_there()
    notes = run(*going_on, "120").notes
    assert notes.count("the story has 120 tokens, and --max-tokens is 120") == 2
    assert now_there() == there


def test_a_file_that_was_edited_is_read_again(tiny: Path) -> None:
    assert run(*beginning(tiny), "-n", "30", "-o", "story.txt", "--count", "2").code == 0
    before = text(1)
    Path("story-02.txt").write_text("Another beginning")
    output = run("generate", "--resume", "-o", "story.txt", "--count", "2", "-n", "60")
    assert output.code == 0
    assert "story-02.txt: the file was edited: it is read again, with " in output.notes
    assert text(1).startswith(before.removesuffix("\n"))
    assert text(2).startswith("Another beginning")
    assert len(text(2)) > len("Another beginning\n")


def test_a_full_disk_ends_all_and_keeps_what_was_written(tiny: Path, tmp_path: Path) -> None:
    arguments = [*beginning(tiny), "--count", "3", "--checkpoint", "20", "-n", "90"]
    assert run(*arguments, "-o", "whole.txt").code == 0
    n_bytes = (tmp_path / "whole-01.txt.h2o").stat().st_size
    with full_disk(n_bytes - 100):
        output = run(*arguments, "-o", "story.txt")
    assert output.code == 1
    assert "error: cannot save the session to " in output.notes
    assert "File too large" in output.notes
    output = run("generate", "--resume", "-o", "story.txt", "--count", "3")
    assert output.code == 0, output.notes
    for i in (1, 2, 3):
        assert text(i) == Path(f"whole-{i:02}.txt").read_text()


@real
def test_one_bar_over_all(tiny: Path) -> None:
    arguments = ["-n", "1500", "--no-loop-guard", "-o", "story.txt", "--count", "2"]
    screen = Screen(*beginning(tiny), *arguments)
    screen.wait_for(r"writing.*[\d,]+ of 3,000 tokens.* tokens/s.* \d:\d\d:\d\d left")
    screen.wait_for("2 texts · wrote 3,000 tokens")
    assert screen.end() == 0
