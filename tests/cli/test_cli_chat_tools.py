"""`pyh2o chat --mcp`: a scripted model calls tools of a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cli_fakes import press_ctrl_c, run
from forced_text import add_call
from mcp_server import config, this_server
from pyh2o import Llama
from pyh2o.cli.chat import loop
from pyh2o.writing.tools import Call
from scripted_chat import (
    CHATS,
    Person,
    RecordedConversation,
    Script,
    ScriptedModel,
    chat_with,
    notes_of,
    scripted_chat,
)
from tiny_chat import OPENS_THOUGHTS, TOOLS, write_chat_gguf
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("surroundings")

SETTINGS = {"n_ctx": 4000, "hh": 2000, "recent": 1000}
ADD = Call("add", '{"a": 1, "b": 2}')
QUESTION = "run it? yes, no, or always for this tool> "


@pytest.fixture(scope="module")
def tools_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    path = write_chat_gguf(tmp_path_factory.mktemp("tools") / "tools.gguf", TOOLS, n_layer=1)
    llm = tiny_llama(path, **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture
def model(tools_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    return scripted_chat(tools_llm, monkeypatch)


@pytest.fixture
def mcp(tmp_path: Path) -> str:
    """Return the path of a configuration with a server that has one tool."""
    return f"--mcp={config(tmp_path, one=this_server('add'))}"


def call_of(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def steps() -> list[tuple[Call, ...]]:
    """Return the calls of the last turn."""
    return [step.calls for step in RecordedConversation.last.turns[-1].steps]


# -------------------------------------------------------------------------------------------------
# Scripts
# -------------------------------------------------------------------------------------------------


def test_script_calls_a_tool_that_is_allowed(model: ScriptedModel, mcp: str) -> None:
    model.say(f"Let me see.\n{add_call(1, 2)}", "It is 3.")
    output = run("chat", mcp, "--allow-tool", "add", stdin="1 + 2?\n")
    assert (output.code, output.text) == (0, "Let me see.\nIt is 3.\n")
    assert notes_of(output) == ['calls add {"a": 1, "b": 2}', "-> 3"]
    assert steps() == [(replace(ADD, result="3"),)]


def test_configuration_file_may_have_both_options(
    model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = config(tmp_path, one=this_server("add"))
    (tmp_path / "config.toml").write_text(f'[chat]\nmcp = "{servers}"\nallow-tool = ["add"]\n')
    monkeypatch.setenv("PYH2O_CONFIG", str(tmp_path / "config.toml"))
    model.say(add_call(1, 2), "It is 3.")
    assert run("chat", stdin="1 + 2?\n").text == "It is 3.\n"
    assert steps() == [(replace(ADD, result="3"),)]


def test_a_script_cannot_call_other_tools(model: ScriptedModel, mcp: str) -> None:
    model.say(add_call(1, 2), "I may not.")
    output = run("chat", mcp, stdin="1 + 2?\n")
    assert (output.code, output.text) == (0, "I may not.\n")
    refused = "the call is not allowed (--allow-tool add)"
    assert notes_of(output)[1:] == [f"-> failed: {refused}"]
    assert steps() == [(replace(ADD, result=refused, failed=True),)]


def test_an_unknown_tool_cannot_be_allowed(model: ScriptedModel, mcp: str) -> None:
    output = run("chat", mcp, "--allow-tool", "addd", stdin="1 + 2?\n")
    assert output.code == 1
    assert output.notes == "error: --allow-tool: unknown tool addd: available are add\n"
    output = run("chat", "--allow-tool", "add", stdin="1 + 2?\n")
    assert output.notes == "error: --allow-tool: unknown tool add: available are none (--mcp)\n"


def test_a_long_result_is_read_in_full_and_shown_shortened(
    model: ScriptedModel, tmp_path: Path
) -> None:
    model.say(call_of("lines", '{"n": 60}'), "Long.")
    path = config(tmp_path, one=this_server("lines"))
    output = run("chat", "--mcp", str(path), "--allow-tool", "lines", stdin="how long?\n")
    text = "\n".join(f"line {number} of the long text" for number in range(60))
    assert steps() == [(Call("lines", '{"n": 60}', text),)]
    shown = notes_of(output)[1]
    assert shown.startswith("-> line 0 of the long text line 1 of")
    assert shown.endswith(f"... ({len(text):,} characters)")
    whole = model.llm.detokenize(RecordedConversation.last.tokens).decode()
    assert text in whole


def test_a_server_that_ends_is_reported(model: ScriptedModel, tmp_path: Path) -> None:
    model.say(call_of("die", "{}"), "It is gone.", call_of("add", '{"a": 1, "b": 2}'), "3.")
    path = config(tmp_path, one=this_server("die", "add"), two={"command": "no-such-7h3q"})
    allowed = ("--allow-tool", "die", "--allow-tool", "add")
    output = run("chat", "--mcp", str(path), *allowed, stdin="try\nagain\n")
    assert output.text == "It is gone.\n3.\n"
    first, *notes = notes_of(output)
    assert first.startswith("the MCP server two cannot be started: ")
    ended = "the server one has exited: Connection closed (out of luck)"
    assert notes == ["calls die {}", f"-> failed: {ended}", notes[2], "-> 3"]


def test_reasoning_is_counted_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_chat_gguf(tmp_path / "thinking.gguf", OPENS_THOUGHTS, n_layer=1)
    llm = tiny_llama(path, **SETTINGS)
    model = scripted_chat(llm, monkeypatch)
    thoughts = "Well, one\nand two."
    model.say(f"{thoughts}</think>\n\nThree.", "</think>Bye.")
    output = run("chat", stdin="1 + 2?\n/reasoning\nbye\n/reasoning\n")
    assert output.text == "Three.\nBye.\n"
    first, *shown, none = notes_of(output)
    assert first == f"reasoning: {len(thoughts)} tokens"
    assert shown == ["Well, one", "and two."]
    assert none == "the answer contains no separate reasoning"


# -------------------------------------------------------------------------------------------------
# A person
# -------------------------------------------------------------------------------------------------


def test_the_user_is_asked(model: ScriptedModel, mcp: str) -> None:
    model.say(add_call(1, 2), "Refused.", add_call(1, 2), "Run.")
    output = chat_with(Person("1 + 2?\nno\n1 + 2?\nperhaps\nyes\n"), mcp, "--no-save")
    assert output.text == "Refused.\nRun.\n"
    assert output.notes.count(QUESTION) == 3
    first, second = RecordedConversation.last.turns
    assert first.steps[0].calls == (replace(ADD, result="the user refused this call", failed=True),)
    assert second.steps[0].calls == (replace(ADD, result="3"),)


def test_the_user_can_allow_a_tool(model: ScriptedModel, mcp: str) -> None:
    model.say(add_call(1, 2), add_call(3, 4), "3 and 7.")
    output = chat_with(Person("sums?\na\n/tools\n"), mcp, "--no-save")
    assert output.notes.count(QUESTION) == 1
    assert [call.result for (call,) in steps()] == ["3", "7"]
    assert "one: 1 tool\n  add (allowed)  Adds two numbers.\n" in output.notes


def test_a_call_is_refused_at_the_end_of_the_input(model: ScriptedModel, mcp: str) -> None:
    model.say(add_call(1, 2), "Refused.")
    assert chat_with(Person("1 + 2?\n"), mcp, "--no-save").code == 0
    assert steps()[0][0].failed


def test_ctrl_c_ends_the_call_and_not_the_chat(model: ScriptedModel, tmp_path: Path) -> None:
    def press_soon() -> None:
        threading.Timer(1.0, press_ctrl_c).start()

    model.answers.append(Script([call_of("sleep", '{"seconds": 60}'), press_soon]))
    model.say("You ended it.", "Bye.")
    path = config(tmp_path, one=this_server("sleep"))
    output = chat_with(
        Person("sleep\nbye\n"), "--mcp", str(path), "--allow-tool", "sleep", "--no-save"
    )
    assert (output.code, output.text) == (0, "You ended it.\nBye.\n")
    first = RecordedConversation.last.turns[0]
    assert first.steps[0].calls[0].result == "the user canceled this call"


def test_endless_calls_are_stopped_and_can_be_continued(
    model: ScriptedModel, mcp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_CALL_ROUNDS", 2)
    model.say(add_call(1, 2), add_call(3, 4), add_call(5, 6), "11.")
    output = run("chat", mcp, "--allow-tool", "add", stdin="sums?\n/continue\n")
    assert output.text == "11.\n"
    assert "the answer ends here: the model keeps calling tools; /cont" in output.notes
    assert [call.result for (call,) in steps()] == ["3", "7", "11"]


def test_repeated_calls_are_stopped(model: ScriptedModel, mcp: str) -> None:
    model.say(*[add_call(1, 2)] * 3, "It is 3.")
    output = run("chat", mcp, "--allow-tool", "add", stdin="1 + 2?\n/continue\n")
    assert output.text == "It is 3.\n"
    first = output.notes.partition("keeps calling tools")[0]
    assert (first.count("-> 3"), output.notes.count("-> 3")) == (2, 3)


# -------------------------------------------------------------------------------------------------
# Sessions
# -------------------------------------------------------------------------------------------------


def test_a_session_keeps_its_tools(model: ScriptedModel, mcp: str, tmp_path: Path) -> None:
    model.say(add_call(1, 2), "It is 3.", add_call(3, 4), "It is 7.", add_call(5, 6), "No tools.")
    arguments = ("chat", "--session", "sums", "--allow-tool", "add")
    assert run(*arguments, mcp, stdin="1 + 2?\n").code == 0
    output = run(*arguments, mcp, stdin="3 + 4?\n")
    assert output.text == "It is 7.\n"
    assert "read again" not in output.notes
    output = run("chat", "--session", "sums", stdin="5 + 6?\n")
    assert "-> failed: no tools are connected (pyh2o chat --mcp FILE)" in notes_of(output)
    talk = RecordedConversation.last
    assert [len(turn.steps) for turn in talk.turns] == [1, 1, 1]
    assert [tool.name for tool in talk.tools] == ["add"]
    output = run("sessions", "export", "sums", "-")
    assert output.text.startswith('> 1 + 2?\n\n(add {"a": 1, "b": 2}: 3)\n\nIt is 3.\n\n> 3 + 4?')
    assert (CHATS / "chats.db").exists()


def test_a_session_gets_new_tools(model: ScriptedModel, mcp: str, tmp_path: Path) -> None:
    model.say("Hello.", add_call(1, 2), "It is 3.")
    assert run("chat", "--session", "plain", stdin="hello\n").code == 0
    output = run("chat", "--session", "plain", mcp, "--allow-tool", "add", stdin="1 + 2?\n")
    assert output.text == "It is 3.\n"
    assert "tokens will be read again with the next message" in output.notes
    assert [len(turn.steps) for turn in RecordedConversation.last.turns] == [0, 1]


def test_invalid_tools_are_refused(model: ScriptedModel, mcp: str) -> None:
    output = run("chat", stdin="/tools\n")
    assert output.notes == ("error: this chat has no MCP servers: start it with --mcp FILE\n")
    output = run("chat", "--mcp", "none.json", stdin="")
    assert output.notes == "error: cannot read none.json: No such file or directory\n"
    output = run("chat", "--web", mcp)
    assert "--mcp cannot be used with --web" in output.notes
