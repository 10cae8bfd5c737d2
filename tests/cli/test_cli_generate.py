"""`pyh2o generate`: its output, with a scripted model."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_fakes import Output, press_ctrl_c, run
from fake_story import STORY, FakeModel, names, report, saved_stories
from pyh2o.errors import ModelError, SettingsError

pytestmark = pytest.mark.usefixtures("surroundings")


# -------------------------------------------------------------------------------------------------
# The text and the line after it
# -------------------------------------------------------------------------------------------------


def test_a_story_is_printed(fake: FakeModel) -> None:
    fake.script = [" a time."]
    output = run("generate", "-p", "Once upon", "--seed", "7")
    expected = report(fake, read=fake.n_prompt("Once upon"), wrote=8)
    assert output == Output(0, "Once upon a time.\n", expected)
    assert fake.closed == 1


def test_a_story_is_printed_without_its_prompt(fake: FakeModel) -> None:
    fake.script = ["a time\n"]
    assert run("generate", "-p", "Once upon ", "--no-echo").text == "a time\n"
    fake.script = []
    assert run("generate", "-p", "The end.", "--no-echo").text == ""


def test_a_story_ends_at_the_maximum_of_tokens(fake: FakeModel) -> None:
    fake.script = ["a time"]
    output = run("generate", "-p", "x", "-n", "3", "--seed", "7")
    assert output.text == "xa t\n"
    why = "the maximum number of tokens is reached"
    assert output.notes == report(fake, read=fake.n_prompt("x"), wrote=3, why=why)


def test_a_story_ends_before_a_stop_text(fake: FakeModel) -> None:
    fake.script = ["So it went. THE END. And so on"]
    output = run("generate", "-p", "x ", "--until", "THE", "--until", "THE END.", "--seed", "7")
    assert (output.code, output.text) == (0, "x So it went. \n")
    why = "a text of --until was generated"
    assert output.notes == report(fake, read=fake.n_prompt("x "), wrote=15, why=why)


def test_repeated_loops_end_a_story(fake: FakeModel) -> None:
    fake.script = ["Repeat! " * 400]
    output = run("generate", "-p", "I: ", "-o", "story.txt")
    assert output.code == 0
    last = output.notes.splitlines()[-1]
    assert "the model keeps repeating itself" in last
    assert re.search(r"broke \d+ loops", last)


def test_a_prompt_is_read_from_a_file_or_standard_input(fake: FakeModel) -> None:
    Path("start.txt").write_text("Once\n\n")
    for source, given in (("start.txt", None), ("-", "Once\n\n")):
        fake.script = ["."]
        assert run("generate", "-f", source, stdin=given).text == "Once\n.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "none.txt"], "cannot read none.txt: No such file or directory"),
        (["-f", "/proc/self/mem"], "cannot read /proc/self/mem: Input/output error"),
        (["-f", "latin.txt"], "latin.txt is not UTF-8 text (byte 2): save it as UTF-8"),
        (["-p", ""], "the prompt is empty: give at least one word"),
        (["-p", "\udcff"], "the prompt is not UTF-8 text"),
        (["-p", "x", "-o", "no/x"], "no such folder no: create it, or give another --output"),
        (
            ["-p", "x", "-o", "folder"],
            "folder is not a regular file: give another --output, ",
        ),
        (
            ["-p", "x", "-o", "/dev/null"],
            "/dev/null is not a regular file: give another ",
        ),
        (["-p", "x", "-o", "old.txt"], "old.txt exists: give another --output, or remove it"),
        (
            ["--resume", "-o", "old.txt"],
            "no saved story was written to old.txt: continue its text with --prompt-file old.txt "
            "and another --output",
        ),
        (
            ["--resume", "-o", "none.txt"],
            "no saved story was written to none.txt: start without --resume",
        ),
        (
            ["--resume", "-o", "story.txt"],
            "story.txt.h2o is not a session file of pyh2o: check the name",
        ),
    ],
)
def test_unusable_files_are_refused(fake: FakeModel, arguments: list[str], message: str) -> None:
    Path("folder").mkdir()
    Path("latin.txt").write_bytes("caé".encode("latin-1"))
    Path("old.txt").write_text("old")
    Path("story.txt.h2o").write_text("no session")
    output = run("generate", *arguments)
    assert (output.code, output.text) == (1, "")
    assert output.notes.replace(f"{Path().absolute()}/", "").startswith(f"error: {message}")
    assert output.notes.count("\n") == 1
    assert fake.options is None  # no model was loaded for it
    assert Path("old.txt").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompt TEXT or --prompt-file FILE, or --resume"),
        (["-p", "x", "-f", "y"], "give either --prompt TEXT or --prompt-file FILE"),
        (["--resume"], "--resume requires --output FILE"),
        (["--resume", "-o", "x", "--no-echo"], "--echo cannot be changed with --resume"),
        (["--resume", "-o", "x", "--no-save"], "--no-save cannot be changed with --resume"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    fake: FakeModel, arguments: list[str], message: str
) -> None:
    output = run("generate", *arguments)
    assert output.code == 2
    assert message in output.notes
    assert "Traceback" not in output.notes
    assert fake.options is None


# -------------------------------------------------------------------------------------------------
# A file for the text
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["loading", "reading"])
def test_a_story_without_text_leaves_nothing(fake: FakeModel, fails: str) -> None:
    def fail() -> None:
        raise SettingsError("too long")

    if fails == "loading":
        fake.error = SettingsError("too long")
    fake.before_reading = fail
    assert run("generate", "-p", "x", "-o", "story.txt") == Output(1, "", "error: too long\n")
    assert (names(), saved_stories()) == ([], [])


def test_a_symbolic_link_is_followed(fake: FakeModel) -> None:
    Path("real.txt").touch()
    STORY.symlink_to("real.txt")
    fake.script = ["a"]
    assert run("generate", "-p", "x", "-o", "story.txt", "--no-echo").code == 0
    assert Path("real.txt").read_text() == "a\n"
    assert STORY.is_symlink()
    assert saved_stories() == [("real", "a")]


# -------------------------------------------------------------------------------------------------
# Ctrl-C
# -------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_text(fake: FakeModel) -> None:
    fake.script = [" a", press_ctrl_c, "b c"]
    output = run("generate", "-p", "x", "--seed", "7")
    why = "stopped by Ctrl-C"
    expected = report(fake, read=fake.n_prompt("x"), wrote=3, why=why)
    assert output == Output(130, "x ab\n", expected)


@pytest.mark.parametrize("arguments", [[], ["-o", "story.txt"]])
def test_ctrl_c_while_reading(fake: FakeModel, arguments: list[str]) -> None:
    fake.script = ["never written"]
    fake.before_reading = press_ctrl_c
    output = run("generate", "-p", "x y", "--seed", "7", *arguments)
    n_read = fake.n_prompt("x y")
    assert output == Output(
        130,
        "",
        f"read {n_read} tokens · wrote 0 tokens · stopped by Ctrl-C · seed 7 · "
        f"{fake.llm.kv.summary()}\n",
    )
    assert names() == []


def test_second_ctrl_c_does_not_wait(fake: FakeModel) -> None:
    fake.script = [" a", press_ctrl_c, press_ctrl_c, " b"]
    before = signal.getsignal(signal.SIGINT)
    output = run("generate", "-p", "x")
    assert output == Output(130, "x a\n", "stopped by Ctrl-C\n")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "error",
    [ModelError("broken\nfile"), SettingsError("broken file"), OSError(5, "file", "broken")],
)
def test_library_errors_are_one_line(fake: FakeModel, error: Exception) -> None:
    fake.error = error
    expected = "error: broken: file\n" if isinstance(error, OSError) else "error: broken file\n"
    assert run("generate", "-p", "x") == Output(1, "", expected)


@pytest.mark.parametrize("aborted", [True, False])
def test_ctrl_c_while_loading(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """Whether or not the library can abort the load."""

    class SlowLlama:
        def __init__(self, _path: str, *, load_progress: Callable[[float], None], **_: Any) -> None:
            press_ctrl_c()
            with suppress(KeyboardInterrupt):  # a C callback passes no exception on
                load_progress(0.5)
            if aborted:
                raise ModelError("damaged")

    library = SimpleNamespace(Llama=SlowLlama)
    monkeypatch.setitem(sys.modules, "pyh2o.compat.llama", library)
    expected = Output(130, "", "stopped by Ctrl-C\n")
    assert run("generate", "-m", "m.gguf", "-p", "x") == expected
