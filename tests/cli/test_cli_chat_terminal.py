"""`pyh2o chat` at a terminal: keys and history; and as a real program."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

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
from pyh2o.cli.chat import command as chat
from pyh2o.cli.chat import terminal_input
from pyh2o.cli.chat.commands import COMMANDS
from pyh2o.cli.chat.input import Dropped
from pyh2o.cli.chat.terminal_input import CommandCompleter, TerminalSource
from pyh2o.sessions.chats import open_chats
from scripted_chat import RecordedConversation, Script, ScriptedModel, notes_of, said
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

ENTER, ALT_ENTER = "\r", "\x1b\r"
CTRL_C, CTRL_D, CTRL_Z = "\x03", "\x04", "\x1a"
UP = "\x1b[A"


pytestmark = pytest.mark.usefixtures("surroundings")


def type_keys(
    keys: str, *arguments: str, session: str | None = "work", history: Path | None = None
) -> Output:
    """`pyh2o chat` for a person who types these keys."""
    with (
        pytest.MonkeyPatch.context() as patch,
        create_pipe_input() as pipe,
        create_app_session(pipe),
    ):
        patch.setattr(terminal_input, "create_output", lambda _: DummyOutput())
        pipe.send_text(keys)
        source = TerminalSource(COMMANDS, history)
        patch.setattr(chat, "open_source", lambda **_: source)
        return run("chat", *arguments, *(["--session", session] if session else []))


FAREWELL = "saved as work: pyh2o chat -c resumes it"
GREETING = [
    "tiny.gguf · work · window 1,000 tokens, budget 200 (100 heavy + 100 recent)",
    "/help lists the commands",
]


def test_ctrl_z_suspends_and_is_not_typed(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended: list[object] = []
    monkeypatch.setattr(
        Application, "suspend_to_background", lambda application: suspended.append(application)
    )
    model.say("Hi")
    type_keys(f"Hel{CTRL_Z}lo{ENTER}{CTRL_D}")
    assert said() == ["Hello"]
    assert len(suspended) == 1


def test_enter_sends_and_alt_enter_starts_a_line(model: ScriptedModel) -> None:
    model.say(*["a"] * 4)
    pasted = "\x1b[200~three\r\n  four\n/five\x1b[201~"
    output = type_keys(
        f"one{ENTER}one{ALT_ENTER}two{ENTER}one\\{ENTER}two{ENTER}{pasted}{ENTER}"
        f"lost{CTRL_C}{CTRL_D}"
    )
    assert said() == ["one", "one\ntwo", "one\ntwo", "three\n  four\n/five"]
    assert output.code == 0
    assert notes_of(output) == [*GREETING, "/quit or Ctrl-D quits", FAREWELL]


def test_pasted_commands_of_several_lines(model: ScriptedModel) -> None:
    output = type_keys(f"/etc/passwd\\{ENTER}two{ENTER}/system Be\\{ENTER}kind.{ENTER}/quit{ENTER}")
    assert output.code == 0  # a person has seen it
    assert "error: unknown command /etc/passwd: " in output.notes
    assert RecordedConversation.last.system == "Be\nkind."
    assert said() == []


def test_messages_between_quotes(model: ScriptedModel) -> None:
    model.say(*["a"] * 2)
    output = type_keys(
        f'"""one{ENTER}/two \\{ENTER}"""{ENTER}'
        f'"""three{ENTER}lost{CTRL_C}'
        f'"""lost{ENTER}{CTRL_D}'
        f"four{ENTER}{CTRL_D}"
    )
    assert said() == ["one\n/two \\", "four"]
    assert notes_of(output) == [
        *GREETING,
        "/quit or Ctrl-D quits",
        'error: the input ended before """: nothing was sent',
        FAREWELL,
    ]


def test_edit_offers_the_last_message_and_can_be_dropped(model: ScriptedModel) -> None:
    model.say(*["a"] * 2)
    empty = "\x7f" * len("Hello\nyou")
    output = type_keys(
        f"Hello\\{ENTER}you{ENTER}/edit{ENTER}x{CTRL_C}/edit{ENTER}{empty}{ENTER}"
        f"/edit{ENTER} two{ENTER}/quit{ENTER}"
    )
    assert said() == ["Hello\nyou", "Hello\nyou two"]
    assert notes_of(output) == [
        *GREETING,
        "/quit or Ctrl-D quits",
        "the message is unchanged",
        FAREWELL,
    ]


def test_a_history_that_cannot_be_written_does_not_end_the_chat(
    model: ScriptedModel, tmp_path: Path
) -> None:
    model.say("a")
    assert type_keys(f"one{ENTER}{CTRL_D}", history=tmp_path / "none" / "history").code == 0
    assert said() == ["one"]


def test_answers_to_questions_are_not_remembered(tmp_path: Path) -> None:
    history = tmp_path / "history"
    with (
        pytest.MonkeyPatch.context() as patch,
        create_pipe_input() as pipe,
        create_app_session(pipe),
    ):
        patch.setattr(terminal_input, "create_output", lambda _: DummyOutput())
        pipe.send_text(f"Hello{ENTER}always{ENTER}{CTRL_C}")
        source = TerminalSource(COMMANDS, history)
        assert source.read() == "Hello"
        assert source.ask("run it? ") == "always"
        with pytest.raises(Dropped):
            source.ask("run it? ")
    assert "Hello" in history.read_text()
    assert "always" not in history.read_text()


def test_ctrl_c_stops_an_answer_and_not_the_chat(model: ScriptedModel) -> None:
    model.answers.extend([Script(["a", press_ctrl_c, "b", "c"]), Script(["d"])])
    output = type_keys(f"Hello{ENTER}Who?{ENTER}{CTRL_D}")
    assert (output.code, output.text) == (0, "ab\nd\n")
    assert notes_of(output) == [
        *GREETING,
        "stopped by Ctrl-C: the text so far is kept, and /continue continues it",
        FAREWELL,
    ]
    assert [turn.answer for turn in RecordedConversation.last.turns] == ["ab", "d"]


def test_second_ctrl_c_ends_the_chat_and_the_last_turn_is_saved(model: ScriptedModel) -> None:
    model.answers.extend([Script(["a"]), Script(["b", press_ctrl_c, press_ctrl_c, "c"])])
    output = type_keys(f"one{ENTER}two{ENTER}three{ENTER}")
    assert (output.code, output.text) == (130, "a\nb\n")
    run("chat", "-c", stdin="")
    said = [(turn.user, turn.answer) for turn in RecordedConversation.last.turns]
    assert said == [("one", "a"), ("two", "b")]


def test_errors_do_not_end_the_chat(model: ScriptedModel) -> None:
    from pyh2o.errors import ContextLimitError

    model.answers.extend([ContextLimitError("too long"), Script(["a"])])
    output = type_keys(f"Hello{ENTER}/read none.txt{ENTER}Who?{ENTER}{CTRL_D}")
    assert (output.code, output.text) == (0, "a\n")
    assert notes_of(output)[2:4] == [
        "error: too long",
        "error: cannot read none.txt: No such file or directory",
    ]


def test_the_last_turn_is_shown(model: ScriptedModel) -> None:
    model.say("a", "one two\n")
    type_keys(f"Hello{ENTER}Who?{ENTER}{CTRL_D}")
    n_text = model.n_text(("Hello", "a"), ("Who?", "one two\n"))
    assert notes_of(type_keys(CTRL_D)) == [
        f"continuing a conversation of 2 turns, {n_text} tokens",
        "> Who?",
        "one two",
        *GREETING,
        FAREWELL,
    ]


def test_a_chat_without_a_name_is_resumed_unchanged(model: ScriptedModel) -> None:
    model.say(*["a"] * 2)
    for _ in range(2):
        type_keys(f"Hello{ENTER}/save{ENTER}{CTRL_D}", session=None)
    with open_chats() as database:
        second, _ = database.texts()
    assert second.title == "Hello (2)"
    output = type_keys(CTRL_D, "-c", session=None)
    n_text = model.n_text(("Hello", "a"))
    assert notes_of(output)[0] == f"continuing a conversation of 1 turn, {n_text} tokens"
    with open_chats() as database:
        assert database.texts()[0] == second


def test_prompt_does_not_wait_for_the_disk(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the chat does."""
    store, read, prompted_again = RecordedConversation.store, TerminalSource.read, Event()

    def store_late(conversation: RecordedConversation, *, leaving: bool = False) -> None:
        assert not conversation.turns or prompted_again.wait(PATIENCE)
        time.sleep(0.05)
        store(conversation, leaving=leaving)

    def noted_read(source: TerminalSource, *arguments: Any, **keywords: Any) -> str:
        if RecordedConversation.last.turns:
            prompted_again.set()
        return read(source, *arguments, **keywords)

    monkeypatch.setattr(RecordedConversation, "store", store_late)
    monkeypatch.setattr(TerminalSource, "read", noted_read)
    model.say("a")
    assert type_keys(f"one{ENTER}{CTRL_D}").code == 0
    run("chat", "-c", stdin="")
    assert [turn.user for turn in RecordedConversation.last.turns] == ["one"]


def completions(line: str) -> list[str]:
    found = CommandCompleter(COMMANDS).get_completions(Document(line), CompleteEvent())
    return [line[: len(line) + each.start_position] + each.text for each in found]


def test_tab_completes_commands_their_words_and_files() -> None:
    Path("notes.txt").touch()
    Path("night").mkdir()
    assert completions("/re") == ["/regen", "/reasoning", "/read", "/recalled"]
    assert completions("/kv ") == ["/kv all"]
    assert completions("/set top") == ["/set top_k", "/set top_p"]
    assert completions("/read n") == ["/read night", "/read notes.txt"]
    assert completions("/load not") == ["/load notes.txt"]
    with open_chats() as database:
        database.create("conversation", "nothing new")
    assert completions("/load not") == ["/load nothing new", "/load notes.txt"]
    assert completions("n") == completions("/system n") == completions("x /re") == []


# -------------------------------------------------------------------------------------------------
# The real program
# -------------------------------------------------------------------------------------------------

real = pytest.mark.real
READY = r"\x1b\[\?2004h[^\n]*>"
"""The prompt, which first turns bracketed paste on."""
ANSWERED = r"\x1b\[\?2004l\s*[^\s\x1b]{5}"
"""What was typed is no longer the prompt's, and there are some characters of an answer."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, seed=17, n_ctx_train=1 << 17, chat_template=CHAT_TEMPLATE)


@real
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_script_ends_if_its_output_cannot_be_written(tiny: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            pyh2o_command("chat", "-m", tiny, "-n", "20", *ENDLESS),
            input=b"Hello\nWho?\n",
            env=program_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b"error: standard output: No space left on device\n"


@real
def test_chat_on_a_terminal(tiny: Path) -> None:
    screen = Screen("chat", "-m", tiny, *ENDLESS)
    screen.wait_for(r"window 131,072 tokens, budget 25,958 ")
    screen.wait_for(READY)
    screen.type("Hello\r")
    screen.wait_for(ANSWERED)
    screen.type(CTRL_C)
    screen.wait_for("stopped by Ctrl-C: the text so far is kept, and /continue continues it\r\n")
    screen.wait_for(READY)
    screen.type(f"lost{CTRL_C}")
    screen.wait_for("/quit or Ctrl-D quits")
    screen.type("/what\r")
    screen.wait_for("unknown command /what")
    screen.wait_for(READY)
    screen.type(f"{UP}{UP}")  # the line before the last
    screen.wait_for("Hello")
    screen.type(CTRL_C)
    screen.wait_for("/quit or Ctrl-D quits")
    screen.wait_for(READY)
    screen.type(CTRL_D)
    assert screen.end() == 0

    screen = Screen("chat", "--continue", "-m", tiny)
    screen.wait_for("continuing a conversation of 1 turn, ")
    screen.wait_for("> Hello")
    screen.wait_for("/help lists the commands")
    screen.wait_for(READY)
    screen.type(UP)
    screen.wait_for("/what")
    screen.type(f"{CTRL_C}{CTRL_D}")
    assert screen.end() == 0


@real
def test_text_goes_to_a_file_and_all_else_to_the_terminal(tiny: Path, tmp_path: Path) -> None:
    screen = Screen("chat", "-m", tiny, "-n20", *ENDLESS, stdout=tmp_path / "answers.txt")
    screen.wait_for(READY)
    screen.type("Hello\r")
    screen.wait_for("tokens/s")
    screen.wait_for(READY)
    screen.type(CTRL_D)
    assert screen.end() == 0
    text = Path("answers.txt").read_text()
    assert len(text) > 10
    assert text.endswith("\n")
    assert "\x1b" not in text
    assert "Hello" not in text
