"""Stories that a server keeps: written on, cut, taken back, exported and imported."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import pytest

from cli_fakes import run
from needed import needed
from pyh2o import Llama
from pyh2o.engine import Engine
from pyh2o.sessions.conversation import Conversation
from pyh2o.sessions.database import Database
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from stored_texts import stored

clients = needed("session_client", name="the server's packages")

START = "Once upon a time"


def begin(client: Any, name: str = "tale", text: str = START) -> Any:
    return client.begin(name, kind="story", text=text)


def test_a_story_is_that_of_the_class(client: Any, alone: Llama) -> None:
    begun = begin(client)
    assert (begun["kind"], begun["text"], begun["passages"]) == ("story", START, [])
    tale = Story(alone, START, echo=True, sampling=Sampling(seed=1))
    for n in (20, 1, 60):
        done = client.done("/tale/passages", max_tokens=n)
        expected = "".join(tale.write(n))
        assert done["text"] == expected.removeprefix(START)
        assert done["turn"] is None
        assert done["finish"] == tale.finish
        assert client.got("/tale")["text"] == tale.text()
        client.server.app.state.sessions.let_go_idle(0)
    assert done["kv"]["compactions"] > 0
    loaded = stored(Story, "tale", alone)
    assert loaded.tokens == tale.tokens
    assert loaded.text() == tale.text()


def test_a_story_is_cut_where_one_likes(client: Any) -> None:
    begin(client)
    client.done("/tale/passages", max_tokens=40)
    text = client.got("/tale")["text"]
    for at in (len(text) - 3, len(START) + 5, len(START), 4):
        client.done("/tale/passages", at=at, max_tokens=15)
        changed = client.got("/tale")
        assert changed["text"][:at] == text[:at]
        assert changed["passages"][-1] == at
        texts = client.got("/tale/tokens")
        assert "".join(texts["texts"]) == changed["text"]
    assert changed["text"] != text


def test_words_of_a_story_are_replaced(client: Any) -> None:
    """What is before them is not read again; passages stay where they begin."""
    begin(client)
    for _ in range(2):
        client.done("/tale/passages", max_tokens=12)
    before = client.got("/tale")
    text, (first, second) = before["text"], before["passages"]
    at = second + 3
    changed = client.got("/tale/replace", "POST", {"start": at, "end": at + 2, "text": "🐋 new"})
    assert changed["text"] == text[:at] + "🐋 new" + text[at + 2 :]
    assert changed["passages"] == [first, second]
    kv = client.got("/tale/map")["kv"]
    assert 0 < kv["position"] < changed["tokens"]
    moved = client.got("/tale/replace", "POST", {"start": 0, "end": 4, "text": "Then"})
    assert moved["text"] == "Then" + changed["text"][4:]
    longer = client.got("/tale/replace", "POST", {"start": 0, "end": 0, "text": "Well. "})
    assert longer["passages"] == [first + 6, second + 6]
    joined = client.got(
        "/tale/replace", "POST", {"start": first + 6, "end": second + 9, "text": ""}
    )
    assert joined["passages"] == [first + 6]
    texts = client.got("/tale/tokens")["texts"]
    assert "".join(texts) == joined["text"]
    refusal = client.refused("POST", "/tale/replace", {"start": 3, "end": 10**6, "text": ""})
    assert refusal.startswith("the text has no characters 3 to 1000000: it has ")
    client.begin("talk")
    refusal = client.refused("POST", "/talk/replace", {"start": 0, "end": 0, "text": "x"})
    assert refusal.startswith("talk is a conversation")


def test_passages_are_taken_back(client: Any) -> None:
    begin(client)
    texts = [START]
    for _ in range(3):
        client.done("/tale/passages", max_tokens=12)
        texts.append(client.got("/tale")["text"])
    assert client.got("/tale/undo", "POST", {})["text"] == texts[2]
    again = client.done("/tale/passages", max_tokens=12)
    assert client.got("/tale")["text"] == texts[2] + again["text"]
    for _ in range(2):
        client.got("/tale/undo", "POST", {})
    assert client.got("/tale/undo", "POST", {})["text"] == START
    assert "no generated passage to undo" in client.refused("POST", "/tale/undo", {})


def test_a_story_is_no_conversation(client: Any) -> None:
    begin(client)
    client.begin("talk")
    route, body = "/tale/answers", {"message": "Hello"}
    assert "tale is a story: " in client.refused("POST", route, body)
    assert "talk is a conversation: " in client.refused("POST", "/talk/passages", {})
    client.refused("PATCH", "/tale", {"system": "Be brief."})
    client.refused("POST", "", {"kind": "story", "system": "Be brief."})
    client.refused("POST", "", {"kind": "conversation", "text": START})
    kinds = {each["name"]: each["kind"] for each in client.got("")["data"]}
    assert kinds == {"tale": "story", "talk": "conversation"}


def test_a_story_s_map_pins_and_sampling(client: Any) -> None:
    begin(client)
    client.done("/tale/passages", max_tokens=20)
    pinned = client.got("/tale/pins", "POST", {"start": 6, "end": 10})["pinned"]
    changed = client.got("/tale", "PATCH", {"sampling": {"temperature": 0}})
    assert changed["sampling"]["temperature"] == 0
    client.done("/tale/passages", max_tokens=90)
    found = client.got("/tale/map")
    assert found["pinned"] == pinned
    ((start, end),) = pinned
    assert set(range(start, end)) <= set(found["kept"]["positions"])
    assert len(found["kept"]["positions"]) < found["kv"]["position"]
    assert client.got("/tale/recalled") == []


def test_exports(client: Any) -> None:
    client.begin("talk", system="Be brief.")
    answer = client.say("talk", "Hello *there*", max_tokens=10)["turn"]["answer"].strip()
    text = client.ask("GET", "/talk/export").body.decode()
    assert text == f"(Be brief.)\n\n> Hello *there*\n\n{answer}\n"
    marked = client.ask("GET", "/talk/export?format=markdown").body.decode()
    assert marked == f"# talk\n\n> Be brief.\n\n**You:** Hello *there*\n\n{answer}\n"
    exported = client.got("/talk/export?format=json")
    assert exported["turns"][0]["user"] == "Hello *there*"
    begin(client)
    assert client.ask("GET", "/tale/export").body.decode() == f"{START}\n"


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_what_was_exported_goes_on_elsewhere(
    client: Any, kind: str, engine: Engine, alone: Llama
) -> None:
    if kind == "story":
        begin(client, "old")
        client.done("/old/passages", max_tokens=20)
    else:
        client.begin("old", system="Be brief.")
        for message in ("Hello", "And then", "What?"):
            client.say("old", message, max_tokens=20)
    exported = client.got("/old/export?format=json")
    assert client.refused("POST", "", exported, 409).startswith("there is a session old")
    imported = client.got("", "POST", {**exported, "name": "new"})
    old = client.got("/old")
    assert (imported["kind"], imported["sampling"]) == (kind, old["sampling"])
    if kind == "story":
        assert imported["text"] == old["text"]
        client.done("/new/passages", max_tokens=5)
        assert client.got("/new")["text"].startswith(old["text"])
        return
    said = [(turn["user"], turn["answer"]) for turn in old["turns_list"]]
    assert [(turn["user"], turn["answer"]) for turn in imported["turns_list"]] == said
    assert imported["system"] == "Be brief."
    answer = client.say("new", "Go on", max_tokens=12)["text"]
    talk = Conversation(alone, system="Be brief.", sampling=Sampling(**old["sampling"]))
    talk.take_over(said)
    assert answer == "".join(talk.say("Go on", max_tokens=12))
    assert json.loads(client.ask("GET", "/new/export?format=json").body)["turns"][:3] == [
        {**turn, "finish": "stop"} for turn in exported["turns"]
    ]


def test_terminals_see_stories(client: Any) -> None:
    """But go on with the last conversation."""
    client.begin("talk")
    begin(client)
    lines = run("sessions", "list").text.splitlines()
    assert lines[0].startswith("tale  ")
    assert lines[0].endswith(f"a story  {START}")
    assert lines[1].endswith("0 turns")
    client.server.app.state.sessions.let_go_idle(0)
    assert "is a story" in run("chat", "--session", "tale", stdin="").notes


def test_a_story_is_told_a_lorebook_and_a_note(client: Any, alone: Llama) -> None:
    """Which are no part of its text, and of no character of it."""
    lorebook = {"entries": [{"keys": ["comet"], "content": "{{user}} loves comets."}]}
    fields = {"kind": "story", "memory": "It rains.", "note": "Be sad.", "user": "Ada"}
    begun = client.begin("tale", text="A comet came. And", lorebook=lorebook, **fields)
    assert (begun["note"], begun["lore_entries"]) == ("Be sad.", 1)
    for _ in range(2):
        client.done("/tale/passages", max_tokens=9)
    session = client.got("/tale")
    story = stored(Story, "tale", alone)
    told = alone.detokenize(story.tokens[slice(*story.told[1])]).decode()
    assert told == "\n[Ada loves comets.]\n[Author's note: Be sad.]\n"
    assert session["text"] == story.text()
    assert "Ada" not in session["text"]
    for _ in range(2):  # in its place, and from its file
        tokens = client.got("/tale/tokens")
        assert "".join(tokens["texts"]) == session["text"]
        assert tokens["ends"][-1] == len(session["text"])
        client.server.app.state.sessions.let_go_idle(0)
    exported = client.got("/tale/export?format=json")
    assert (exported["memory"], exported["note"]) == ("It rains.", "Be sad.")
    assert client.begin(**{**exported, "name": "again"})["note"] == "Be sad."
    changed = client.got("/tale", "PATCH", {"note": "", "lorebook": {"entries": []}})
    assert (changed["note"], changed["lore_entries"]) == ("", 0)
    client.done("/tale/passages", max_tokens=9)
    assert len(stored(Story, "tale", alone).told) == 2
    assert client.got("/tale/undo", "POST", {})["text"] == session["text"]


def test_a_full_disk_changes_no_session(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(client)
    client.done("/tale/passages", max_tokens=5)
    before = client.got("/tale")

    def full(*_values: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "_add_pictures", full)
        told = [
            client.refused("POST", "", {"name": "b", "kind": "story", "text": "a"}, 507),
            client.refused("PATCH", "/tale", {"note": "a"}, 507),
            client.refused("POST", "/tale/undo", {}, 507),
        ]
        stream = client.ask("POST", "/tale/passages", {"max_tokens": 3}).body.decode()
        told.append(json.loads(stream.rpartition("data: ")[2])["error"]["message"])
        assert set(told) == {
            "the disk is full: free some space and try again; what was saved before is unchanged"
        }
    assert client.got("/tale") == before
    assert client.names() == ["tale"]
    client.done("/tale/passages", max_tokens=3)
