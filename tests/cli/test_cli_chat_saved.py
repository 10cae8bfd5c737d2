"""`pyh2o chat` and `pyh2o sessions`: conversations that are saved, and gone on with."""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest

from cli_fakes import Output, run
from pyh2o import Llama
from pyh2o.cache.settings import EvictionSettings
from pyh2o.cli.chat import command as chat_command
from pyh2o.cli.chat.input import LineSource
from pyh2o.cli.options import KVType, RunOptions
from pyh2o.errors import SessionError
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


def test_model_is_left_alone_while_it_is_saved(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the start, where another system prompt is saved before the chat is greeted."""
    model.say("Hi")
    run("chat", "--session", "work", stdin="Hello\n")
    save, kv = RecordedConversation.save, Llama.kv
    saving = Event()

    def save_slowly(conversation: RecordedConversation, path: Path) -> None:
        saving.set()
        sleep(0.2)
        save(conversation, path)
        saving.clear()

    def kv_of_a_model_at_rest(llm: Llama) -> object:
        assert not saving.is_set()
        return kv.fget(llm)  # type: ignore[attr-defined]  # a property

    monkeypatch.setattr(RecordedConversation, "save", save_slowly)
    monkeypatch.setattr(Llama, "kv", property(kv_of_a_model_at_rest))
    person = LineSource(BytesIO(b"/stats\n"), interactive=True)
    monkeypatch.setattr(chat_command, "open_source", lambda **_: person)
    output = run("chat", "--session", "work", "-s", "Be kind.")
    assert output.code == 0
    assert "window 1,000 tokens" in output.notes
    assert output.notes.endswith("saved as work: pyh2o chat -c goes on\n")


def test_what_a_session_fixes_is_said(model: ScriptedModel, tmp_path: Path) -> None:
    model.say("Hi", "Ho")
    run("chat", "--session", "plain", stdin="Hello\n")
    run("chat", "--session", "fair", "--fair-turns", stdin="Hello\n")
    assert run("chat", "--session", "fair", "--fair-turns").code == 0
    model.options = None
    assert run("chat", "--session", "plain", "--fair-turns") == Output(
        1,
        "",
        "error: --fair-turns cannot be given to a session that was made without it: model and "
        "cache stay what they were, system prompt and sampling can be changed; start a new "
        "session for --fair-turns\n",
    )
    assert model.options is None  # no model was loaded for it


@pytest.mark.parametrize(("option", "value"), [("--hh", "0.2"), ("--policy", "tova")])
def test_full_cache_of_a_session_takes_no_settings_of_eviction(
    model: ScriptedModel, tmp_path: Path, option: str, value: str
) -> None:
    model.say("Hi")
    run("chat", "--session", "work", stdin="Hello\n")
    path = tmp_path / "chats" / "work.h2o"
    session = read_session(path, "conversation")
    session.header["settings"] |= {"evict": False}
    write_session(path, session)
    output = run("chat", "--session", "work", option, value)
    assert output.code == 1
    assert output.notes.startswith(
        f"error: {option} cannot be given to a session that was made with --no-evict: "
    )


def test_every_change_is_saved(model: ScriptedModel) -> None:
    model.say(*["Hi"] * 4)
    script = [
        "Hello", "Who?", "/undo", "/regen", "/edit What?", "/system Be kind.", "/set temp 0",
        "/stats", "/set", "/kv", "/help", "/nonsense",
    ]  # fmt: skip
    run("chat", "--session", "work", stdin="\n".join(script))
    assert len(RecordedConversation.last.saves) == 7
    run("chat", "-c")
    assert answers_of() == [("What?", "Hi")]
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
    failure = "this chat is not saved: cannot save the session: the disk is full"
    assert (
        output
        == Output(
            1,  # a command could not be done
            "a\na\na\na\n",
            model.footer(*said[:1])
            + f"warning: {failure}\n"
            + model.footer(*said[:2])
            + f"error: {failure}; /save FILE saves a copy elsewhere\n"
            + model.footer(*said[:3])
            + "saved as work\n"
            + model.footer(*said),
        )
    )


def fail_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: RecordedConversation, _path: Path) -> None:
        raise SessionError("cannot save the session: the disk is full")

    monkeypatch.setattr(RecordedConversation, "save", full)


def test_script_that_is_not_saved_fails(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_save(monkeypatch)
    model.say("Hi")
    output = run("chat", "--session", "work", stdin="Hello\n")
    assert output == Output(
        1,
        "Hi\n",
        model.footer(("Hello", "Hi"))
        + "warning: this chat is not saved: cannot save the session: the disk is full\n",
    )


@pytest.mark.parametrize("command", ["/clear", "/load copy.h2o"])
def test_conversation_that_cannot_be_saved_is_not_left(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    model.say("Hi")
    run("chat", stdin="zero\n/save copy.h2o\n")
    fail_to_save(monkeypatch)
    model.say("Hi", "Ho")
    output = run("chat", "--session", "work", stdin=f"Hello\n{command}\nWho?\n")
    assert output.code == 1
    failure = "this chat is not saved: cannot save the session: the disk is full"
    assert notes_of(output) == [
        f"warning: {failure}",
        f"error: {failure}; /save FILE saves a copy elsewhere",
    ]
    assert answers_of() == [("Hello", "Hi"), ("Who?", "Ho")]


def test_clear_begins_a_new_conversation_and_the_old_one_stays(
    model: ScriptedModel, tmp_path: Path
) -> None:
    model.say("Hi", "Ho")
    arguments = ["--session", "my work", "-s", "Be kind."]
    output = run("chat", *arguments, stdin="Hello\n/clear\nWho?\n")
    assert notes_of(output) == [
        "a new conversation begins, and `pyh2o chat --session 'my work'` goes on with the one so "
        "far; the system prompt stays"
    ]
    assert answers_of() == [("Who?", "Ho")]
    assert RecordedConversation.last.system == "Be kind."
    assert len(list((tmp_path / "chats").iterdir())) == 2
    run("chat", "-c")
    assert answers_of() == [("Who?", "Ho")]
    run("chat", "--session", "my work")
    assert answers_of() == [("Hello", "Hi")]


def test_clear_lets_another_chat_have_the_old_conversation(model: ScriptedModel) -> None:
    codes: list[int] = []

    def open_the_old_one() -> None:
        codes.append(run("sessions", "rm", "work").code)

    model.answers.extend([Script(["Hi"]), Script([open_the_old_one, "Ho"])])
    assert run("chat", "--session", "work", stdin="Hello\n/clear\nWho?\n").code == 0
    assert codes == [0]


def test_clear_of_an_empty_conversation_changes_nothing(
    model: ScriptedModel, tmp_path: Path
) -> None:
    model.say("Hi")
    output = run("chat", "--session", "work", stdin="/clear\nHello\n")
    assert notes_of(output) == ["forgotten: 0 turns"]
    assert [path.name for path in (tmp_path / "chats").iterdir()] == ["work.h2o"]


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
