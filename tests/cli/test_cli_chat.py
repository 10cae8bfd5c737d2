"""`pyh2o chat`: its output, with a scripted model."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_fakes import Output, press_ctrl_c, run
from pyh2o import Llama
from pyh2o.errors import ContextLimitError, UnsupportedModelError
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.thinking import Thinking
from scripted_chat import (
    RecordedConversation,
    Script,
    ScriptedModel,
    answers_of,
    said,
    scripted_chat,
)
from tiny_chat import OPENS_THOUGHTS, write_chat_gguf
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("surroundings")


# -------------------------------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------------------------------


def test_script_is_answered_line_by_line(model: ScriptedModel) -> None:
    model.say("Hi there", "I am H2O\n")
    output = run("chat", "--seed", "7", "--system", "Be kind.", stdin="Hello\n\n  Who?  \n")
    first, second = ("Hello", "Hi there"), ("Who?", "I am H2O\n")
    assert output == Output(
        0,
        "Hi there\nI am H2O\n",
        model.footer(first, system="Be kind.") + model.footer(first, second, system="Be kind."),
    )
    conversation = RecordedConversation.last
    assert conversation.said == ["Hello", "Who?"]
    assert conversation.system == "Be kind."
    assert conversation.sampling == Sampling(seed=7)
    assert conversation.limits == [1000, 1000]  # the window
    assert model.closed


def test_a_line_that_starts_with_a_space_is_sent(model: ScriptedModel) -> None:
    model.say("Hi", "Ho")
    assert run("chat", stdin=' /usr is full\n """ quoted\n').code == 0
    assert said() == ["/usr is full", '""" quoted']


@pytest.mark.parametrize(
    ("script", "messages"),
    [
        ('"""one\n/two\n\n  three \\\n"""\nfour\n', ["one\n/two\n\n  three \\", "four"]),
        ('""" one """\n', [" one "]),
        ('"""\none\n  """  \n', ["one\n  "]),
        ("one\\\ntwo\\\n/three\nfour\n", ["one\ntwo\n/three", "four"]),
        ("one\\\n", ["one"]),
        ("one\r\ntwo", ["one", "two"]),
    ],
)
def test_a_message_can_have_several_lines(
    model: ScriptedModel, script: str, messages: list[str]
) -> None:
    model.say(*["Hi"] * len(messages))
    assert run("chat", stdin=script).code == 0
    assert said() == messages


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('"""one\ntwo\n', 'the input ended before """: nothing was sent'),
        ('""" """\n', "the message is empty: nothing was sent"),
    ],
)
def test_an_unfinished_or_empty_message_is_not_sent(
    model: ScriptedModel, script: str, message: str
) -> None:
    assert run("chat", stdin=script) == Output(1, "", f"error: {message}\n")
    assert said() == []


def test_a_script_that_is_not_utf8_is_refused(model: ScriptedModel) -> None:
    model.say("Hi")
    output = run("chat", stdin=b"\xef\xbb\xbfHello\n\xff\n")
    assert (output.code, output.text) == (1, "Hi\n")
    assert output.notes.endswith("error: line 2 of standard input is not UTF-8 text\n")
    assert said() == ["Hello"]


# -------------------------------------------------------------------------------------------------
# How answers end
# -------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_script_and_keeps_the_text(model: ScriptedModel) -> None:
    model.answers.append(Script(["Hi", press_ctrl_c, " there", "!"]))
    output = run("chat", "--session", "work", stdin="Hello\nWho?\n")
    assert output == Output(
        130,
        "Hi \n",
        model.footer(("Hello", "Hi "), cut=True)
        + "stopped by Ctrl-C: the text so far is kept, and /continue continues it\n"
        "stopped by Ctrl-C\n",
    )
    assert answers_of() == [("Hello", "Hi ")]
    assert RecordedConversation.last.stores == 3  # also before it was answered


def test_ctrl_c_before_the_first_token_removes_the_message(model: ScriptedModel) -> None:
    model.say("never said")
    model.before_reading = press_ctrl_c
    output = run("chat", stdin="Hello\n")
    assert output == Output(
        130,
        "",
        model.empty_footer(model.n_text())  # what comes before any message stays
        + "stopped by Ctrl-C: your message was removed\nstopped by Ctrl-C\n",
    )


def test_an_empty_answer_removes_the_message(model: ScriptedModel) -> None:
    model.say("Hi", "", "")
    output = run("chat", stdin="Hello\nWho?\n/regen\n")
    said = ("Hello", "Hi")
    assert output == Output(
        0,
        "Hi\n",
        model.footer(said)
        + model.empty_footer(model.n_text(said))
        + "the answer is empty: your message was removed\n"
        + model.empty_footer(model.n_text(("Hello", "")) - 1)
        + "the answer is empty: the old answer stays\n",
    )
    assert answers_of() == [("Hello", "Hi")]


def test_an_answer_ends_at_the_trained_context(model: ScriptedModel) -> None:
    model.answers.append(Script(["Hi"], room=False))
    output = run("chat", stdin="Hello\n")
    assert output == Output(
        0,
        "Hi\n",
        model.footer(("Hello", "Hi"))
        + "the answer ends here: all 1,000 positions of the trained context are used; all "
        "text is kept, but a new chat is needed to continue\n",
    )


def test_an_answer_ends_when_the_window_is_full(
    chat_llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_llama(Path(chat_llm.model_path), n_ctx=256, evict=False) as full:
        model = scripted_chat(full, monkeypatch)
        model.changes = {"window": 256}
        model.say("Hi" * 200)
        output = run("chat", "--max-tokens", "500", stdin="Hello\n")
    n_answer = 256 - model.n_text(("Hello", ""))
    assert len(output.text) == n_answer + 1
    assert output.notes == (
        f"{n_answer} tokens · 2.0 tokens/s · first after 0.5 s · all 255 tokens cached\n"
        "the answer ends here: the window of 256 tokens is full (--no-evict); all "
        "text is kept, but a new chat is needed to continue\n"
    )


def test_a_rejected_message_ends_a_script(model: ScriptedModel) -> None:
    model.answers.extend([Script(["Hi"]), ContextLimitError("too long"), Script(["no"])])
    output = run("chat", stdin="Hello\nmuch\nmore\n")
    assert output == Output(1, "Hi\n", model.footer(("Hello", "Hi")) + "error: too long\n")


def test_a_model_without_a_chat_template_is_refused(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedModelError("no template")

    monkeypatch.setattr(RecordedConversation, "__init__", refuse)
    assert run("chat", stdin="Hello\n") == Output(1, "", "error: no template\n")
    assert model.closed


# -------------------------------------------------------------------------------------------------
# Thoughts
# -------------------------------------------------------------------------------------------------


def test_reasoning_is_limited_by_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session keeps the limit until it is changed."""
    path = write_chat_gguf(tmp_path / "thinking.gguf", OPENS_THOUGHTS, n_layer=1)
    model = scripted_chat(tiny_llama(path, n_ctx=1000, hh=100, recent=100), monkeypatch)
    for options, thinking in (
        (["--reasoning-budget", "9"], Thinking(budget=9)),
        ([], Thinking(budget=9)),
        (["--reasoning-budget", "-1"], Thinking(budget=-1)),
        ([], Thinking(budget=-1)),
    ):
        model.say("Hm.</think>Yes.")
        assert run("chat", "--session", "x", *options, stdin="Hi\n").text == "Yes.\n"
        assert RecordedConversation.last.thinking == thinking
    refused = run("chat", "--no-thinking", stdin="Hi\n")
    assert (refused.code, refused.text) == (1, "")
    assert refused.notes.startswith("error: enable_thinking: ")
