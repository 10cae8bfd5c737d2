"""`pyh2o chat` and `pyh2o sessions`: whole outputs, with a model that says what the test wants."""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_fakes import Output, press_ctrl_c, run
from pyh2o import Llama
from pyh2o.cache.settings import EvictionSettings
from pyh2o.cli.chat import commands as chat_commands
from pyh2o.cli.options import KVType, RunOptions
from pyh2o.errors import ContextLimitError, SessionError, UnsupportedModelError
from pyh2o.generation.sampling import Sampling
from pyh2o.policies import TOVA
from pyh2o.sessions.session_file import read_session, write_session
from scripted_chat import (
    RecordedConversation,
    Script,
    ScriptedModel,
    open_chat_model,
    scripted_chat,
)
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return open_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    return scripted_chat(llm, monkeypatch)


def said() -> list[str]:
    """The messages that reached the model."""
    return RecordedConversation.last.said


def notes_of(output: Output) -> list[str]:
    """The notes without the footers."""
    return [line for line in output.notes.splitlines() if " · KV " not in line]


def answers_of() -> list[tuple[str, str]]:
    return [(turn.user, turn.answer) for turn in RecordedConversation.last.turns]


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


def test_options_of_sampling_reach_the_conversation(model: ScriptedModel) -> None:
    run(
        "chat",
        "--temp=0",
        "--top-k=5",
        "--top-p=0.5",
        "--min-p=0",
        "--repeat-penalty=1",
        "--seed=3",
    )
    assert RecordedConversation.last.sampling == Sampling(
        temperature=0.0, top_k=5, top_p=0.5, min_p=0.0, repeat_penalty=1.0, seed=3
    )


def test_seed_is_new_each_run(model: ScriptedModel) -> None:
    seeds = []
    for _ in range(2):
        run("chat", stdin="")
        seeds.append(RecordedConversation.last.sampling.seed)
    assert seeds[0] != seeds[1]


def test_line_that_begins_with_a_space_is_sent(model: ScriptedModel) -> None:
    model.say("Hi", "Ho")
    assert run("chat", stdin=' /usr is full\n """ quoted\n').code == 0
    assert said() == ["/usr is full", '""" quoted']


@pytest.mark.parametrize(
    ("script", "messages"),
    [
        ("/multi\none\n/two\n\n  three\n/end\n", ["one\n/two\n\n  three"]),
        ("/multi one\ntwo /end\n /end \nthree\n", ["one\ntwo /end", "three"]),
        ("/multi\nfoo \\\nbar\n/end\n", ["foo \\\nbar"]),
        ('"""one\n/two\nthree"""\nfour\n', ["one\n/two\nthree", "four"]),
        ('""" one """\n', [" one "]),
        ('"""\none\n  """  \n', ["one\n  "]),
        ("one\\\ntwo\\\n/three\nfour\n", ["one\ntwo\n/three", "four"]),
        ("one\\\n", ["one"]),
        ("one\r\ntwo", ["one", "two"]),
    ],
)
def test_messages_of_several_lines(model: ScriptedModel, script: str, messages: list[str]) -> None:
    model.say(*["Hi"] * len(messages))
    assert run("chat", stdin=script).code == 0
    assert said() == messages


@pytest.mark.parametrize(
    ("script", "end"), [("/multi\none\ntwo\n", "/end"), ('"""one\ntwo\n', '"""')]
)
def test_message_without_its_end_is_not_sent(model: ScriptedModel, script: str, end: str) -> None:
    output = run("chat", stdin=script)
    assert output == Output(1, "", f"error: the input ended before {end}: nothing was sent\n")
    assert said() == []


@pytest.mark.parametrize("script", ["/multi\n\n/end\n", '""" """\n'])
def test_empty_message_is_not_sent(model: ScriptedModel, script: str) -> None:
    output = run("chat", stdin=script)
    assert output == Output(1, "", "error: the message is empty: nothing was sent\n")


def test_script_that_is_not_utf8(model: ScriptedModel) -> None:
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
        + "stopped by Ctrl-C: what was said so far stays\nstopped by Ctrl-C\n",
    )
    assert answers_of() == [("Hello", "Hi ")]
    assert len(RecordedConversation.last.saves) == 1


def test_ctrl_c_before_the_first_word_takes_the_message_back(model: ScriptedModel) -> None:
    model.say("never said")
    model.before_reading = press_ctrl_c
    output = run("chat", stdin="Hello\n")
    assert output == Output(
        130,
        "",
        model.empty_footer(model.n_text())  # what comes before any message stays
        + "stopped by Ctrl-C: your message was taken back\nstopped by Ctrl-C\n",
    )


def test_model_with_nothing_to_say(model: ScriptedModel) -> None:
    model.say("Hi", "", "")
    output = run("chat", stdin="Hello\nWho?\n/regen\n")
    said = ("Hello", "Hi")
    assert output == Output(
        0,
        "Hi\n",
        model.footer(said)
        + model.empty_footer(model.n_text(said))
        + "the model had nothing to say: your message was taken back\n"
        + model.empty_footer(model.n_text(("Hello", "")) - 1)
        + "the model had nothing to say: the old answer stays\n",
    )
    assert answers_of() == [("Hello", "Hi")]


def test_answer_that_is_cut(model: ScriptedModel) -> None:
    model.say("Hi there")
    output = run("chat", "--max-tokens", "2", stdin="Hello\n")
    assert output.notes == model.footer(("Hello", "Hi"), cut=True) + (
        "the answer was cut at 2 tokens: ask it to go on, or give a larger --max-tokens\n"
    )
    assert RecordedConversation.last.limits == [2]


def test_end_of_the_trained_context(model: ScriptedModel) -> None:
    model.answers.append(Script(["Hi"], room=False))
    output = run("chat", stdin="Hello\n")
    assert output == Output(
        0,
        "Hi\n",
        model.footer(("Hello", "Hi"))
        + "the answer ends here: all 1,000 positions the model was trained for are used up; all "
        "text is kept, but start a new chat to go on\n",
    )


def test_full_cache_that_is_full(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_llama(Path(llm.model_path), n_ctx=256, evict=False) as full:
        model = scripted_chat(full, monkeypatch)
        model.changes = {"window": 256}
        model.say("Hi" * 200)
        output = run("chat", "--max-tokens", "500", stdin="Hello\n")
    n_answer = 256 - model.n_text(("Hello", "")) + 1
    assert len(output.text) == n_answer + 1
    assert output.notes == (
        f"{n_answer} tokens · 2.0 tokens/s · first after 0.5 s · KV 256/300 cells · full cache · "
        "3.0 MiB\n"
        "the answer ends here: the window of 256 tokens is full, and --no-evict drops nothing; all "
        "text is kept, but start a new chat to go on\n"
    )


def test_refused_message_ends_a_script(model: ScriptedModel) -> None:
    model.answers.extend([Script(["Hi"]), ContextLimitError("too long"), Script(["no"])])
    output = run("chat", stdin="Hello\nmuch\nmore\n")
    assert output == Output(1, "Hi\n", model.footer(("Hello", "Hi")) + "error: too long\n")


def test_model_that_cannot_chat(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedModelError("no template")

    monkeypatch.setattr(RecordedConversation, "__init__", refuse)
    assert run("chat", stdin="Hello\n") == Output(1, "", "error: no template\n")
    assert model.closed


# -------------------------------------------------------------------------------------------------
# Commands
# -------------------------------------------------------------------------------------------------


def test_help(model: ScriptedModel) -> None:
    assert run("chat", stdin="/help\n/?\n") == Output(0, "", f"{chat_commands.help_text()}\n" * 2)
    lines = chat_commands.help_text().splitlines()
    assert lines[0] == "/help [COMMAND]      this list, or more about one command"
    names = " ".join(line.split()[0] for line in lines if line.startswith("/"))
    assert names == (
        "/help /quit /clear /regen /undo /edit /system /read /multi /save /load /stats /kv /set"
    )


def test_help_of_a_command(model: ScriptedModel) -> None:
    expected = (
        "/undo\ntake the last message and its answer back\nOnce more takes back the one before.\n"
    )
    assert run("chat", stdin="/help undo\n/help /undo\n") == Output(0, "", expected * 2)
    output = run("chat", stdin="/help undi\n")
    assert output == Output(1, "", "error: there is no command /undi: did you mean /undo?\n")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/foo bar", "/foo: /help lists the commands; "),
        ("/regenn", "/regenn: did you mean /regen? "),
        ("/UNDO", "/UNDO: did you mean /undo? "),
        ("/usr/bin is full", "/usr/bin: /help lists the commands; "),
        ("/", "/: /help lists the commands; "),
    ],
)
def test_unknown_commands_are_never_sent(model: ScriptedModel, line: str, hint: str) -> None:
    model.say("Hi")
    output = run("chat", stdin=f"{line}\nHello\n")
    assert output == Output(
        1,  # at the end: the script was not done as it was written
        "Hi\n",
        f"error: unknown command {hint}begin the line with a space to send it to the model\n"
        + model.footer(("Hello", "Hi")),
    )
    assert said() == ["Hello"]


@pytest.mark.parametrize("quit_line", ["/quit", "/quit ", "/exit", "/bye"])
def test_quit(model: ScriptedModel, quit_line: str) -> None:
    assert run("chat", stdin=f"{quit_line}\nHello\n") == Output(0, "", "")
    assert said() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/quit now", "/quit stands alone: /help quit explains it"),
        ("/read", "/read needs more: /read FILE [TEXT]"),
        ("/load ", "/load needs more: /load FILE"),
        ("/regen", "there is no message yet: type one"),
        ("/undo", "there is no message yet: type one"),
        ("/edit Hello", "there is no message yet: type one"),
        ("/save", "this chat is not saved as it goes: /save FILE saves a copy of it"),
        ("/kv few", "/kv takes a number of lines, or all"),
        ("/kv 0", "/kv takes a number of lines, or all"),
        ("/set colour", "there is no setting colour: did you mean "),
        ("/set t 1", "there is no setting t: did you mean temperature or top_k or top_p or typ"),
        ("/set temp hot", "temperature is 'hot': give a number"),
        ("/set top-k 1.5", "top_k is '1.5': give a number"),
        ("/set temp -1", "temperature is -1.0: give 0 for the likeliest token, or more, such as"),
        ("/read none.txt", "cannot read none.txt: No such file or directory"),
        ("/read latin.txt", "latin.txt is not UTF-8 text: save it as UTF-8"),
        ("/read empty.txt", "empty.txt is empty: nothing was sent"),
        ("/read .", "cannot read .: Is a directory"),
        ("/read 'my", 'a quote in "\'my" is not closed'),
        ("/read ~nobody-here/x.txt", "'~nobody-here/x.txt' cannot be the name of a file"),
        ("/save a\0b", r"'a\x00b' cannot be the name of a file"),
        (f"/save {'x' * 300}", f"{'x' * 300}: File name too long"),
        ("/save none/x.h2o", "cannot save the session to none/x.h2o: No such file or directory"),
        ("/load none.h2o", "there is no session file none.h2o: check the name"),
        ("/load a b", "'a b' is more than a file: put quotes around a name with spaces"),
    ],
)
def test_commands_that_cannot_be_done(
    model: ScriptedModel, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "latin.txt").write_bytes("caé".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"\n")
    output = run("chat", stdin=f"{line}\n")
    assert (output.code, output.text) == (1, "")
    assert output.notes.startswith(f"error: {message}")
    assert output.notes.count("\n") == 1


def test_regen_and_edit(model: ScriptedModel) -> None:
    model.say("one", "two", "three")
    output = run("chat", stdin="Hello\n/regen\n/edit Good  morning \n")
    assert output == Output(
        0,
        "one\ntwo\nthree\n",
        model.footer(("Hello", "one"))
        + model.footer(("Hello", "two"))
        + model.footer(("Good  morning", "three")),
    )
    assert said() == ["Hello", "Hello", "Good  morning"]
    assert answers_of() == [("Good  morning", "three")]


def test_edit_needs_a_text_in_a_script(model: ScriptedModel) -> None:
    model.say("one")
    output = run("chat", stdin="Hello\n/edit\n")
    assert output.code == 1
    assert output.notes.endswith("error: a script has to give the new message: /edit TEXT\n")


def test_undo_and_clear(model: ScriptedModel) -> None:
    model.say(*["a"] * 5)
    output = run(
        "chat", "-s", "Be kind.", stdin="one\ntwo\nthree\n/undo\n/undo\nfour\nfive\n/clear\n/undo\n"
    )
    assert notes_of(output) == [
        "taken back: three (2 turns left)",
        "taken back: two (1 turn left)",
        "forgotten: 3 turns; the system prompt stays",
        "error: there is no message yet: type one",
    ]
    assert RecordedConversation.last.system == "Be kind."


def test_long_messages_are_shown_shortened(model: ScriptedModel) -> None:
    model.say("a")
    output = run("chat", stdin='"""' + "word\n" * 50 + '"""\n/undo\n')
    shown = "word " * 11 + "wo..."
    assert output.notes.endswith(f"taken back: {shown} (0 turns left)\n")


def test_system(model: ScriptedModel) -> None:
    model.say("a", "b")
    lines = ["/system", "/system Be kind.", "Hello", "/system Be brief.\\", "Always.", "/system"]
    output = run("chat", stdin="\n".join([*lines, "Who?", '/system ""']))
    hello, who = ("Hello", "a"), ("Who?", "b")
    n_brief = model.n_text(hello, system="Be brief.\nAlways.")
    n_both = model.n_text(hello, who)
    assert notes_of(output) == [
        "no system prompt but the model's own",
        "system prompt: Be kind.",
        f"{n_brief} tokens will be read again with the next message",
        "system prompt: Be brief.",
        "Always.",
        "system prompt: Be brief.",
        "Always.",
        f"reading {n_brief} tokens again",
        f"{n_both} tokens will be read again with the next message",
        "no system prompt but the model's own",
    ]
    assert RecordedConversation.last.system is None


def test_read(model: ScriptedModel, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"\xef\xbb\xbfone\r\n/two\r\n")
    (tmp_path / "my notes.txt").write_text("three\n")
    model.say(*["a"] * 6)
    script = [
        "/read notes.txt",
        "/read notes.txt What's this?",
        "/read my notes.txt",
        "/read 'my notes.txt' Well?",
        r"/read my\ notes.txt",
        "/multi",
        "x",
        "/end",
    ]
    assert run("chat", stdin="\n".join(script)).code == 0
    assert said() == [
        "one\n/two",
        "one\n/two\n\nWhat's this?",
        "three",
        "three\n\nWell?",
        "three",
        "x",
    ]


def test_set(model: ScriptedModel) -> None:
    output = run("chat", "--seed", "7", stdin="/set\n/set temp\n/set top-k 5\n/set temperature 0\n")
    lines = [line.split() for line in output.notes.splitlines()]
    assert lines == [
        ["temperature", "0.8"],
        ["top_k", "40"],
        ["top_p", "0.95"],
        ["min_p", "0.05"],
        ["typical_p", "1.0"],
        ["repeat_penalty", "1.1"],
        ["frequency_penalty", "0.0"],
        ["presence_penalty", "0.0"],
        ["seed", "7"],
        ["temperature", "0.8"],
        ["top_k", "5"],
        ["temperature", "0.0"],
    ]
    assert RecordedConversation.last.sampling == Sampling(temperature=0.0, top_k=5, seed=7)


def test_stats(model: ScriptedModel) -> None:
    model.say("Hi there", "one two three")
    model.changes = {
        "tokens_evicted": 1234,
        "rows_evicted": 1,
        "compactions": 12,
        "rows_moved": 5678,
        "rebases": 1,
        "rebase_seconds": 0.0625,
        "window": 8192,
    }
    output = run("chat", "--seed", "7", stdin="/stats\nHello you\nWho\n/stats\n")
    lines = notes_of(output)
    before = [
        "conversation   0 turns · 0 tokens of text",
        "cache          0 of 300 cells · budget 200 (100 heavy + 100 recent) · slack 100 · "
        "window 8,192",
        "policy         h2o",
        "evicted        1,234 tokens · 1 row",
        "compactions    12 in 0.250 s · 5,678 rows moved",
        "re-bases       1 in 0.062 s · original positions",
        "memory         3.0 of 8.0 MiB of a full cache: K 1.0 + V 1.0 + scores 1.0",
        "sampling       temperature 0.8 · top_k 40 · top_p 0.95 · min_p 0.05 · typical_p 1.0 · "
        "repeat_penalty 1.1 · frequency_penalty 0.0 · presence_penalty 0.0 · seed 7",
        "saved          no: /save FILE saves a copy",
    ]
    assert lines[:9] == before
    n_first = model.n_text(("Hello you", "Hi there"))
    used = model.n_text(("Hello you", "Hi there"), ("Who", "one two three"))
    n_read = used - 13 - n_first
    n_both = n_read + n_first - 8
    assert lines[9:] == [
        f"conversation   2 turns · {used} tokens of text",
        f"last answer    {n_read} tokens read · {n_read * 2:.1f} tokens/s · 13 tokens written · "
        "2.0 tokens/s",
        f"all answers    {n_both} tokens read · {n_both:.1f} tokens/s · 21 tokens written · "
        "2.0 tokens/s",
        before[1].replace("0 of", f"{used} of", 1),
        *before[2:],
    ]


def test_stats_of_a_full_cache(model: ScriptedModel) -> None:
    model.changes = {"evicting": False}
    lines = run("chat", stdin="/stats\n").notes.splitlines()
    assert lines[1:3] == [
        "cache          0 of 300 cells · full cache, nothing is evicted",
        "memory         3.0 MiB: K 1.0 + V 1.0",
    ]


def test_kv_of_an_empty_cache(model: ScriptedModel) -> None:
    assert run("chat", stdin="/kv\n") == Output(0, "", "the KV cache is empty\n")


# -------------------------------------------------------------------------------------------------
# Saved conversations
# -------------------------------------------------------------------------------------------------


def test_session_goes_on(model: ScriptedModel, tmp_path: Path) -> None:
    model.say("Hi", "Ho")
    first = run("chat", "--session", "work", "--seed", "7", "-s", "Be kind.", stdin="Hello\n")
    hello, who = ("Hello", "Hi"), ("Who?", "Ho")
    assert first == Output(0, "Hi\n", model.footer(hello, system="Be kind."))
    second = run("chat", "--session", "work", stdin="Who?\n")
    n_text = model.n_text(hello, system="Be kind.")
    assert second == Output(
        0,
        "Ho\n",
        f"continuing a conversation of 1 turn, {n_text} tokens\n"
        + model.footer(hello, who, system="Be kind."),
    )
    conversation = RecordedConversation.last
    assert [turn.user for turn in conversation.turns] == ["Hello", "Who?"]
    assert (conversation.system, conversation.sampling) == ("Be kind.", Sampling(seed=7))
    assert conversation.saves == [tmp_path / "chats" / "work.h2o"]
    assert [path.name for path in (tmp_path / "chats").iterdir()] == ["work.h2o"]
    assert (tmp_path / "chats").stat().st_mode & 0o777 == 0o700


def test_continue_takes_the_chat_last_changed(model: ScriptedModel) -> None:
    model.say(*["Hi"] * 4)
    for name in ("one", "two", "one"):
        run("chat", "--session", name, stdin=f"{name}\n")
    assert run("chat", "-c", stdin="more\n").code == 0
    assert [turn.user for turn in RecordedConversation.last.turns] == ["one", "one", "more"]


def test_options_that_are_typed_replace_those_of_the_session(model: ScriptedModel) -> None:
    model.say("Hi")
    run("chat", "--session", "x", "-s", "Be kind.", "--temp=0", "--seed=7", stdin="Hello\n")
    output = run("chat", "-c", "-s", "Be brief.", "--seed=8", "--top-k=3")
    n_kind = model.n_text(("Hello", "Hi"), system="Be kind.")
    n_brief = model.n_text(("Hello", "Hi"), system="Be brief.")
    assert output == Output(
        0,
        "",
        f"continuing a conversation of 1 turn, {n_kind} tokens\n"
        f"{n_brief} tokens will be read again with the next message\n",
    )
    conversation = RecordedConversation.last
    assert conversation.sampling == Sampling(temperature=0.0, top_k=3, seed=8)
    assert conversation.system == "Be brief."
    assert len(conversation.saves) == 1
    assert run("chat", "-c", "-s", "Be brief.").notes.count("\n") == 1  # nothing to change


def test_every_change_is_saved(model: ScriptedModel) -> None:
    model.say(*["Hi"] * 4)
    script = [
        "Hello", "Who?", "/undo", "/regen", "/edit What?", "/system Be kind.", "/set temp 0",
        "/clear", "/stats", "/set", "/kv", "/help", "/nonsense",
    ]  # fmt: skip
    run("chat", "--session", "work", stdin="\n".join(script))
    assert len(RecordedConversation.last.saves) == 8
    run("chat", "-c")
    assert RecordedConversation.last.turns == ()
    assert RecordedConversation.last.sampling.temperature == 0.0


def test_nothing_is_saved_before_there_is_an_answer(model: ScriptedModel, tmp_path: Path) -> None:
    script = "/clear\n/set temp 0\n/system x\n/save\n"
    output = run("chat", "--session", "work", stdin=script)
    assert output.notes.endswith("error: there is nothing to save yet\n")
    assert list((tmp_path / "chats").iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["--no-save", "--session", "work"]])
def test_script_leaves_nothing_behind(
    model: ScriptedModel, tmp_path: Path, arguments: list[str]
) -> None:
    model.say("Hi")
    assert run("chat", *arguments, stdin="Hello\n").code == 0
    assert list(tmp_path.iterdir()) == []


def test_continue_without_saving(model: ScriptedModel, tmp_path: Path) -> None:
    model.say("Hi", "Ho")
    run("chat", "--session", "work", stdin="Hello\n")
    before = (tmp_path / "chats" / "work.h2o").read_bytes()
    assert run("chat", "-c", "--no-save", stdin="Who?\n").text == "Ho\n"
    assert (tmp_path / "chats" / "work.h2o").read_bytes() == before


def test_nothing_to_continue(model: ScriptedModel, tmp_path: Path) -> None:
    expected = (
        f"error: no conversation is saved in {tmp_path}/chats: start one without --continue\n"
    )
    assert run("chat", "-c") == Output(1, "", expected)
    assert model.options is None  # no model was loaded for it


def test_continue_and_session_together(model: ScriptedModel) -> None:
    output = run("chat", "-c", "--session", "work")
    assert output.code == 2
    assert "give either --continue or --session NAME" in output.notes


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "-a", "a\\b", "a\nb", " a", "x" * 101])
def test_names_that_are_refused(model: ScriptedModel, tmp_path: Path, name: str) -> None:
    for command in (["chat", f"--session={name}"], ["sessions", "rm", "--", name]):
        output = run(*command)
        assert (output.code, output.text) == (1, "")
        assert output.notes.startswith(f"error: {name!r} cannot be the name of a session: ")
    assert model.options is None
    assert list(tmp_path.iterdir()) == []


def test_names_may_have_spaces_and_other_letters(model: ScriptedModel, tmp_path: Path) -> None:
    model.say("Hi")
    assert run("chat", "--session", "Ma thèse 2.0", stdin="Hello\n").code == 0
    assert (tmp_path / "chats" / "Ma thèse 2.0.h2o").exists()


def test_session_that_is_open_elsewhere(model: ScriptedModel, tmp_path: Path) -> None:
    model.say("Hi")
    run("chat", "--session", "work", stdin="Hello\n")
    model.options = None
    with (tmp_path / "chats" / ".work.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        expected = Output(
            1,
            "",
            "error: session work is open in another chat: leave that one first, or give another "
            "--session\n",
        )
        assert run("chat", "--session", "work", stdin="Who?\n") == expected
        assert run("chat", "-c", stdin="Who?\n") == expected
        assert run("sessions", "rm", "work") == expected
        assert model.options is None
        # Looking at it does no harm.
        assert run("chat", "-c", "--no-save").code == 0
    assert run("chat", "-c").code == 0


def test_damaged_session_stays_as_it_is(model: ScriptedModel, tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    file = tmp_path / "chats" / "work.h2o"
    file.write_text("damaged")
    output = run("chat", "--session", "work", stdin="Hello\n")
    assert output.code == 1
    assert output.notes == f"error: {file} is not a session file of pyh2o: check the name\n"
    assert model.options is None
    assert file.read_text() == "damaged"


def test_failing_saves_are_said_once(model: ScriptedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.answers.extend(Script(["a"]) for _ in range(4))
    save = RecordedConversation.save

    def full(_self: RecordedConversation, _path: Path) -> None:
        raise SessionError("cannot save the session: the disk is full")

    def repair() -> None:
        monkeypatch.setattr(RecordedConversation, "save", save)

    monkeypatch.setattr(RecordedConversation, "save", full)
    model.answers[2].pieces.append(repair)
    output = run("chat", "--session", "work", stdin="one\ntwo\n/save\nthree\n/save\nfour\n")
    said = [(word, "a") for word in ("one", "two", "three", "four")]
    assert output == Output(
        0,
        "a\na\na\na\n",
        model.footer(*said[:1])
        + "warning: this chat is not saved: cannot save the session: the disk is full\n"
        + model.footer(*said[:2])
        + model.footer(*said[:3])
        + "saved as work\n"
        + model.footer(*said),
    )


def test_unwritable_folder(model: ScriptedModel, tmp_path: Path) -> None:
    (tmp_path / "chats").write_text("a file")
    output = run("chat", "--session", "work", stdin="Hello\n")
    assert output == Output(
        1,
        "",
        f"error: {tmp_path}/chats cannot be used (File exists): make it writable, set PYH2O_CHATS "
        "to another folder, or give --no-save\n",
    )


def test_copies(model: ScriptedModel, tmp_path: Path) -> None:
    model.say(*["a"] * 4)
    (tmp_path / "precious.txt").write_text("old")
    script = ["one", "/save copy.h2o", "two", "/save ./copy.h2o", "three", "/save precious.txt"]
    output = run("chat", stdin="\n".join([*script, "/load copy.h2o", "four"]))
    said = [(word, "a") for word in ("one", "two", "three")]
    assert output == Output(
        1,
        "a\n" * 4,
        model.footer(*said[:1])
        + "saved in copy.h2o: /load goes on from here\n"
        + model.footer(*said[:2])
        + "saved in copy.h2o: /load goes on from here\n"
        + model.footer(*said[:3])
        + "error: precious.txt exists: give another name\n"
        + f"continuing a conversation of 2 turns, {model.n_text(*said[:2])} tokens\n"
        + model.footer(*said[:2], ("four", "a")),
    )
    assert [turn.user for turn in RecordedConversation.last.turns] == ["one", "two", "four"]
    assert (tmp_path / "precious.txt").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.h2o", "precious.txt"]


def test_loading_leaves_the_session_as_it_is(model: ScriptedModel, tmp_path: Path) -> None:
    model.say(*["a"] * 4)
    run("chat", stdin="one\n/save copy.h2o\n")
    run("chat", "--session", "work", stdin="two\n/load copy.h2o\nthree\n")
    names = sorted(path.name for path in (tmp_path / "chats").iterdir())
    assert len(names) == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}\.h2o", names[0])
    run("chat", "--session", "work")
    assert [turn.user for turn in RecordedConversation.last.turns] == ["two"]
    run("chat", "--session", names[0].removesuffix(".h2o"))
    assert [turn.user for turn in RecordedConversation.last.turns] == ["one", "three"]


def test_loading_into_an_empty_session(model: ScriptedModel, tmp_path: Path) -> None:
    model.say("a")
    run("chat", stdin="one\n/save copy.h2o\n")
    run("chat", "--session", "work", stdin="/load copy.h2o\n")
    assert [path.name for path in (tmp_path / "chats").iterdir()] == ["work.h2o"]


def test_loading_that_fails_changes_nothing(model: ScriptedModel, tmp_path: Path) -> None:
    model.say(*["a"] * 3)
    run("chat", stdin="zero\n/save copy.h2o\n")
    whole = read_session("copy.h2o", "conversation")
    write_session("damaged.h2o", replace(whole, tokens=whole.tokens[1:]))
    output = run("chat", stdin="one\n/load damaged.h2o\ntwo\n")
    assert output == Output(
        1,
        "a\na\n",
        model.footer(("one", "a"))
        + "error: the session file is damaged (its turns are not its text): use another copy of "
        "damaged.h2o\n" + model.footer(("one", "a"), ("two", "a")),
    )


def test_session_whose_state_does_not_fit_is_read_again(
    model: ScriptedModel, tmp_path: Path
) -> None:
    model.say(*["a"] * 3)
    run("chat", stdin="one\n/save copy.h2o\n")
    whole = read_session("copy.h2o", "conversation")
    write_session("odd.h2o", replace(whole, kv=b"of another version"))
    n_text = model.n_text(("one", "a"))
    output = run("chat", stdin="zero\n/load odd.h2o\ntwo\n")
    assert output == Output(
        0,
        "a\na\n",
        model.footer(("zero", "a"))
        + f"continuing a conversation of 1 turn, {n_text} tokens\n"
        + f"reading {n_text} tokens again\n"
        + model.footer(("one", "a"), ("two", "a")),
    )


@pytest.mark.parametrize(
    "edit", [{"turns": "abc"}, {"turns": [{"user": 5}]}, {"settings": {"ctx": "x"}}, {"turns": 5}]
)
def test_edited_session_is_refused_before_a_model_is_loaded(
    model: ScriptedModel, tmp_path: Path, edit: dict[str, Any]
) -> None:
    model.say("a")
    run("chat", "--session", "work", stdin="one\n")
    work = tmp_path / "chats" / "work.h2o"
    whole = read_session(work, "conversation")
    write_session(work, replace(whole, header=whole.header | edit))
    model.options = None
    output = run("chat", "--session", "work", stdin="two\n")
    assert (output.code, output.text, model.options) == (1, "", None)
    assert output.notes.startswith("error: the session file is damaged (its ")
    listed = run("sessions", "list")
    assert listed.code == 0
    assert "work" in listed.text
    assert "damaged" in listed.text


def test_session_brings_its_settings_along(
    model: ScriptedModel, llm: Llama, tmp_path: Path
) -> None:
    model.say("a")
    run("chat", "--session", "work", stdin="one\n")
    assert model.options == RunOptions(sampling=model.options.sampling)
    run("chat", "--session", "work", "--recent", "0.5", "--threads", "3")
    assert model.options == RunOptions(
        model=Path(llm.model_path),
        ctx=1000,
        eviction=EvictionSettings(hh=400, recent=0.5, slack=100, policy=TOVA()),
        threads=3,
        kv_type=KVType.f16,
        sampling=model.options.sampling,
    )
    # A model that is no longer where it was is looked for elsewhere.
    work = tmp_path / "chats" / "work.h2o"
    saved = read_session(work, "conversation")
    moved = saved.header | {"model": saved.header["model"] | {"path": "/gone/tiny.gguf"}}
    write_session(work, replace(saved, header=moved))
    (tmp_path / "tiny.gguf").touch()
    run("chat", "--session", "work")
    assert model.options.model == tmp_path / "tiny.gguf"
    run("chat", "--session", "work", "-m", "other.gguf", "--no-evict", "--kv-type", "q8_0")
    assert (model.options.model, model.options.kv_type) == (Path("other.gguf"), KVType.q8_0)
    assert model.options.no_evict


def test_leftovers_of_killed_saves_are_removed(model: ScriptedModel, tmp_path: Path) -> None:
    chats = tmp_path / "chats"
    chats.mkdir()
    for name in (".pyh2o-session-1.tmp", "notes.tmp"):
        (chats / name).touch()
    model.say("Hi")
    run("chat", "--session", "work", stdin="Hello\n")
    assert sorted(path.name for path in chats.iterdir()) == ["notes.tmp", "work.h2o"]


def test_sessions_list_and_rm(
    model: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    chats = tmp_path / "chats"
    assert run("sessions", "list") == Output(0, "", f"0 in {chats}, 0.0 MB\n")
    model.say(*["a"] * 3)
    run("chat", "--session", "work", stdin="Hello\\\nyou\nWho?\n")
    run("chat", "--session", "2026-01-01-120000", stdin=f"{'word ' * 20}\n")
    (chats / "odd.h2o").touch()
    (chats / ".history").touch()
    for day, name in enumerate(("odd", "2026-01-01-120000", "work")):
        os.utime(chats / f"{name}.h2o", (day * 86_400, day * 86_400))
    listed = run("sessions", "list")
    sizes = [(chats / f"{name}.h2o").stat().st_size / 1e6 for name in ("work", "2026-01-01-120000")]
    assert sizes[0] > 0.05
    assert listed.text == (
        f"work               1970-01-03 00:00  {sizes[0]:>7.1f} MB    2 turns  Hello you\n"
        f"2026-01-01-120000  1970-01-02 00:00  {sizes[1]:>7.1f} MB     1 turn  "
        f"{'word ' * 11}wo...\n"
        f"odd                1970-01-01 00:00      0.0 MB  {chats}/odd.h2o is not a session file "
        "of pyh2o: check the name\n"
    )
    assert listed.notes == f"3 in {chats}, {sum(sizes):.1f} MB\n"
    assert run("sessions", "rm", "work", "nope") == Output(
        1, "", "error: there is no session nope: see `pyh2o sessions list`\n"
    )
    assert (chats / "work.h2o").exists()
    assert run("sessions", "rm", "work", "odd") == Output(0, "", "removed work\nremoved odd\n")
    assert sorted(path.name for path in chats.iterdir()) == [".history", "2026-01-01-120000.h2o"]
    assert run("sessions", "path") == Output(0, f"{chats}\n", "")
