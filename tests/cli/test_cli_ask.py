"""`pyh2o ask`: whole outputs, with a model that says what the test wants, and as a real program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cli_fakes import (
    ENDLESS,
    PATIENCE,
    Output,
    Screen,
    press_ctrl_c,
    program_environment,
    pyh2o_command,
    run,
)
from pyh2o.errors import ContextLimitError
from pyh2o.writing.sampling import Sampling
from scripted_chat import RecordedConversation, Script, ScriptedModel, said
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

pytestmark = pytest.mark.usefixtures("surroundings")


def test_one_question_and_its_answer(model: ScriptedModel) -> None:
    model.say("Hi there")
    output = run("ask", "Who?", "--seed", "7", "-s", "Be kind.", stdin="")
    assert output == Output(0, "Hi there\n", model.footer(("Who?", "Hi there"), system="Be kind."))
    conversation = RecordedConversation.last
    assert (conversation.said, conversation.limits) == (["Who?"], [1000])  # the window
    assert (conversation.system, conversation.sampling) == ("Be kind.", Sampling(seed=7))
    assert (conversation.stores, list(Path().iterdir())) == (0, [])
    assert model.closed


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["What's this?"], "one\n/two\n\n", "one\n/two\n\n\nWhat's this?"),
        (["What's this?"], b"\xef\xbb\xbfone\r\ntwo", "one\ntwo\n\nWhat's this?"),
        ([], "one\ntwo\n", "one\ntwo"),
        (["Why?"], "\n", "Why?"),
        (["Why?", "-f", "a.txt"], "not read", "A\n\nWhy?"),
        (["-f", "a.txt", "-f", "b c.txt", "Why?"], "not read", "A\n\nB\n\nWhy?"),
        (["-f", "a.txt", "-f", "-", "Why?"], "read\n", "A\n\nread\n\nWhy?"),
        (["-f", "a.txt"], "", "A"),
    ],
)
def test_text_comes_before_the_question(
    model: ScriptedModel, arguments: list[str], stdin: str | bytes, message: str
) -> None:
    Path("a.txt").write_text("A\n")
    Path("b c.txt").write_text("B\n")
    model.say("Hi")
    assert run("ask", *arguments, stdin=stdin).text == "Hi\n"
    assert said() == [message]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], "", "no question: give one "),
        ([" "], "\n\n", "no question: give one "),
        (["Why?"], b"\xff", "standard input is not UTF-8 text (byte 0): save it as UTF-8"),
        (["Why?", "-f", "none.txt"], "", "cannot read none.txt: No such file or directory"),
        (["Why?", "-f", "empty.txt"], "", "empty.txt is empty: give a file with a text"),
    ],
)
def test_what_cannot_be_asked(
    model: ScriptedModel, arguments: list[str], stdin: str | bytes, message: str
) -> None:
    Path("empty.txt").touch()
    output = run("ask", *arguments, stdin=stdin)
    assert (output.code, output.text, model.options) == (1, "", None)
    assert output.notes.startswith(f"error: {message}")
    assert output.notes.count("\n") == 1


def test_ctrl_c_keeps_what_was_said(model: ScriptedModel) -> None:
    model.answers.append(Script(["Hi", press_ctrl_c, " there"]))
    assert run("ask", "Who?", stdin="") == Output(
        130, "Hi \n", model.footer(("Who?", "Hi "), cut=True) + "stopped by Ctrl-C\n"
    )
    assert model.closed


def test_answer_that_is_cut(model: ScriptedModel) -> None:
    model.say("Hi there")
    assert run("ask", "Who?", "-n", "2", stdin="") == Output(
        0,
        "Hi\n",
        model.footer(("Who?", "Hi"), cut=True)
        + "the answer reached 2 tokens: give a larger --max-tokens\n",
    )


def test_refusals_are_errors(model: ScriptedModel) -> None:
    model.answers.append(ContextLimitError("too long"))
    assert run("ask", "Who?", stdin="") == Output(1, "", "error: too long\n")
    assert model.closed


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """What it says is random, and it does not stop before `-n`."""
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=5, chat_template=CHAT_TEMPLATE)


def test_answer_to_a_text_that_is_longer_than_the_cache(tiny: Path) -> None:
    """It is that of a chat to the same message."""
    Path("notes.txt").write_text("word " * 100)
    cache = ["--hh=32", "--recent=32", "--slack=8", "--recall=32"]
    options = ["-m", str(tiny), "-n20", "--seed=1", *cache]
    asked = run("ask", "Why?", *options, stdin="word " * 100)
    assert asked.code == 0, asked.notes
    chat = run("chat", *options, stdin="/read notes.txt Why?\n")
    assert asked.text == chat.text
    assert len(asked.text) > 5
    assert "\x1b" not in asked.text + asked.notes


def test_without_any_standard_input(tiny: Path) -> None:
    done = subprocess.run(
        pyh2o_command("ask", "Hello", "-m", tiny, "-n", "20", *ENDLESS),
        env=program_environment(),
        preexec_fn=lambda: os.close(0),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, len(done.stdout) > 10) == (0, True), done.stderr


def test_on_a_terminal_nobody_is_asked_for_a_text(tiny: Path) -> None:
    screen = Screen("ask", "-m", tiny)
    screen.wait_for("error: no question")
    assert screen.end() == 1
