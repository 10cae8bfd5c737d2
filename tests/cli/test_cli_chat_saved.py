"""`pyh2o chat`: conversations that are saved and resumed."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from time import sleep

import pytest

from cli_fakes import Output, run
from pyh2o import Conversation
from pyh2o.cache.settings import EvictionSettings
from pyh2o.cli.options import KVType, RunOptions
from pyh2o.core.text import Text
from pyh2o.policies import Snap
from pyh2o.sessions.chats import open_chats
from pyh2o.writing.sampling import Sampling
from scripted_chat import (
    CHATS,
    Person,
    RecordedConversation,
    ScriptedModel,
    answers_of,
    chat_with,
    held,
    titles,
)

pytestmark = pytest.mark.usefixtures("surroundings")


def test_a_saved_session_is_resumed(model: ScriptedModel) -> None:
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
    assert conversation.stores == 2  # also at the end
    assert titles() == ["work"]
    assert CHATS.stat().st_mode & 0o777 == 0o700


def test_continue_resumes_the_chat_last_changed(model: ScriptedModel) -> None:
    model.say(*["Hi"] * 8)

    def say(name: str) -> None:
        run("chat", "--session", name, stdin=f"{name}\n")

    def continued() -> str:
        with open_chats() as database:
            before = database.texts()
        run("chat", "-c", "--no-save", stdin="more\n")
        with open_chats() as database:
            assert database.texts() == before
        return RecordedConversation.last.turns[0].user

    say("one")
    say("two")
    assert continued() == "two"
    say("one")
    assert continued() == "one"
    assert titles() == ["one", "two"]
    assert run("chat", "-c", stdin="more\n").code == 0
    assert answers_of()[0] == ("one", "Hi")


def test_continue_skips_chats_that_are_open_elsewhere(model: ScriptedModel) -> None:
    for name in ("one", "two", "three"):
        model.say("Hi")
        run("chat", "--session", name, stdin=f"{name}\n")
    with held("three"), held("two"):
        output = run("chat", "-c", stdin="")
        said = "session three is open elsewhere, for example on the page: this is one\n"
        assert output.notes.startswith(said)
        assert answers_of()[0] == ("one", "Hi")
        run("chat", "-c", "--no-save", stdin="")
        assert answers_of()[0] == ("three", "Hi")
        with held("one"):
            output = run("chat", "-c", stdin="")
    assert (output.code, output.notes[:38]) == (1, "error: session three is open in anothe")


def test_typed_options_replace_those_of_the_session(model: ScriptedModel) -> None:
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
    assert conversation.stores == 2
    assert run("chat", "-c", "-s", "Be brief.").notes.count("\n") == 2  # nothing to change


def test_the_model_is_not_used_while_it_is_saved(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the start, where another system prompt is saved before the chat is greeted."""
    model.say("Hi")
    run("chat", "--session", "work", stdin="Hello\n")
    store, kv = RecordedConversation.store, Text.kv
    saving = Event()

    def store_slowly(conversation: RecordedConversation, *, leaving: bool = False) -> None:
        saving.set()
        sleep(0.2)
        store(conversation, leaving=leaving)
        saving.clear()

    def kv_of_a_model_at_rest(text: Text) -> object:
        assert not saving.is_set()
        return kv.fget(text)  # type: ignore[attr-defined]  # a property

    monkeypatch.setattr(RecordedConversation, "store", store_slowly)
    monkeypatch.setattr(Text, "kv", property(kv_of_a_model_at_rest))
    output = chat_with(Person("/stats\n"), "--session", "work", "-s", "Be kind.")
    assert output.code == 0
    assert "window 1,000 tokens" in output.notes
    assert output.notes.endswith("saved as work: pyh2o chat -c resumes it\n")


def test_every_change_is_saved(model: ScriptedModel) -> None:
    model.say(*["Hi"] * 4)
    script = [
        "Hello", "Who?", "/undo", "/regen", "/edit What?", "/system Be kind.", "/set temp 0",
        "/stats", "/set", "/kv", "/help", "/nonsense",
    ]  # fmt: skip
    run("chat", "--session", "work", stdin="\n".join(script))
    assert RecordedConversation.last.stores == 10  # also before the first answer and at the end
    run("chat", "-c")
    assert answers_of() == [("What?", "Hi")]
    assert RecordedConversation.last.sampling.temperature == 0.0


def test_nothing_is_saved_before_there_is_an_answer(model: ScriptedModel) -> None:
    script = "/clear\n/set temp 0\n/system x\n/save\n"
    output = run("chat", "--session", "work", stdin=script)
    assert output.notes.startswith("removed: 0 turns\n")
    assert output.notes.endswith("error: there is nothing to save yet: send a message\n")
    assert titles() == []


def test_script_leaves_nothing_behind(model: ScriptedModel) -> None:
    model.say("Hi")
    assert run("chat", stdin="Hello\n").code == 0
    assert list(Path().iterdir()) == []


def test_continue_without_a_saved_conversation_or_with_a_name_is_refused(
    model: ScriptedModel,
) -> None:
    expected = (
        f"error: no conversation is saved in {CHATS.absolute()}: start one without --continue\n"
    )
    assert run("chat", "-c") == Output(1, "", expected)
    output = run("chat", "-c", "--session", "work")
    assert output.code == 2
    assert "give either --continue or --session NAME" in output.notes
    assert model.options is None  # no model was loaded for it


def test_a_session_that_is_open_elsewhere_is_refused(model: ScriptedModel) -> None:
    model.say("Hi")
    run("chat", "--session", "work", stdin="Hello\n")
    model.options = None
    with held("work"):
        expected = Output(
            1,
            "",
            "error: session work is open in another chat: close that one first\n",
        )
        assert run("chat", "--session", "work", stdin="Who?\n") == expected
        assert run("chat", "-c", stdin="Who?\n") == expected
        assert run("sessions", "remove", "work") == expected
        assert model.options is None
        # Looking at it does no harm.
        assert run("chat", "-c", "--no-save").code == 0
    assert run("chat", "-c").code == 0


def test_a_session_keeps_its_model_and_cache_settings(model: ScriptedModel, tmp_path: Path) -> None:
    model.say("a")
    run("chat", "--session", "work", stdin="one\n")
    assert model.options == RunOptions(sampling=model.options.sampling)
    run("chat", "--session", "work", "--recent", "0.5", "--threads", "3")
    assert model.options == RunOptions(
        model=Path(model.llm.model_path),
        ctx=1000,
        eviction=EvictionSettings(hh=400, recent=0.5, slack=100, policy=Snap(), recall=0),
        threads=3,
        kv_type=KVType.f16,
        sampling=model.options.sampling,
    )
    # A model that is no longer where it was is looked for elsewhere.
    with open_chats() as database:
        (info,) = database.texts()
        moved = info.settings | {"model": info.settings["model"] | {"path": "/gone/tiny.gguf"}}
        database.write(info.id, database.read(info.id).messages, settings=moved)
    Path("tiny.gguf").touch()
    run("chat", "--session", "work")
    assert model.options.model == tmp_path / "tiny.gguf"
    run("chat", "--session", "work", "-m", "other.gguf", "--no-evict", "--kv-type", "q8_0")
    assert (model.options.model, model.options.kv_type) == (Path("other.gguf"), KVType.q8_0)
    assert model.options.no_evict


def test_commands_wait_for_a_save(
    model: ScriptedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A save uses the model in another thread."""
    store = Conversation.store

    def store_slowly(self: Conversation, *, leaving: bool = False) -> None:
        with self.llm.lock:
            sleep(0.05)
            store(self, leaving=leaving)

    monkeypatch.setattr(Conversation, "store", store_slowly)
    model.say(*["It is so."] * 12)
    lines = [
        *["The code is 4711.", "/pin code", "/pin", "/unpin code", "/regen", "/undo", "/continue"],
        *["Again.", "/edit Hello", "/system Be kind.", "/set temperature 0.5", "/set", "/kv"],
        *["More.", "/undo", "/stats", "/recalled", f"/save {tmp_path / 'copy.h2o'}", "/save"],
        *[f"/load {tmp_path / 'copy.h2o'}", "/pin code", "/new", "Hi.", "/load slow", "/pin hello"],
    ]
    output = run("chat", "--session", "slow", stdin="\n".join(lines))
    assert "another thread" not in output.notes, output.notes
    assert "not saved" not in output.notes


@pytest.mark.parametrize("name", [["--session", "new"], []])
def test_a_first_message_is_saved_before_its_answer(model: ScriptedModel, name: list[str]) -> None:
    """If the answer is empty, the session is removed."""
    kept = []

    def keep() -> None:
        with open_chats() as database:
            kept.extend(database.read(database.texts()[0].id).messages)

    model.say("Hi", "")
    model.before_reading = keep
    if name:
        run("chat", *name, stdin="Hello\n")
    else:
        chat_with(Person("Hello"))
    assert [(each.user, each.finish) for each in kept] == [("Hello", None)]
    before = titles()
    run("chat", "--session", "other", stdin="Hello\n")
    assert titles() == before
