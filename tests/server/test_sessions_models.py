"""Sessions that go on with another model of the server, which reads their text again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o import Conversation
from pyh2o.errors import SessionError
from pyh2o.sessions.chats import open_chats
from pyh2o.writing.sampling import Sampling
from stored_texts import stored
from tiny_llama import tiny_llama

clients = needed("session_client", name="the server's packages")
several = needed("several_models", name="the server's packages")

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def models(paths: dict[str, Path]) -> Iterator[Any]:
    with (
        closing(several.Loads(paths).models("first", "second", "bert")) as served,
        served.lease(served.named("second"), lambda: None),  # known by its header then
    ):
        yield served


@pytest.fixture
def client(chats: Path, models: Any) -> Iterator[Any]:
    with clients.serving(models) as running:
        yield running


def tokens_of(name: str) -> bytes:
    with open_chats() as database:
        text = database.find(name)
        assert text is not None
        return b"".join(message.tokens for message in database.read(text).messages)


def said(session: dict[str, Any]) -> list[tuple[str, str]]:
    return [(turn["user"], turn["answer"]) for turn in session["turns_list"]]


def test_a_session_goes_on_with_its_own_model(chats: Path, paths: dict[str, Path]) -> None:
    """Which is loaded for it; those of models that are not here say so."""
    loads = several.Loads(paths)
    with closing(loads.models("first", "second")) as models, clients.serving(models) as client:
        client.begin("a", model="first")
        client.begin("b", model="second")
        texts = {name: client.say(name, "Hello", max_tokens=20)["text"] for name in "ab"}
        assert {each["name"]: each["model"] for each in client.got("")["data"]} == {
            "a": "first",
            "b": "second",
        }
    with tiny_llama(paths["second"], **several.CACHE) as llm:
        talk = Conversation(llm, sampling=Sampling(seed=1))
        assert texts["b"] == "".join(talk.say("Hello", max_tokens=20))
    with closing(loads.models("second")) as models, clients.serving(models) as client:
        listed = {each["name"]: each for each in client.got("")["data"]}
        assert (listed["a"]["model"], listed["a"]["usable"]) == (None, False)
        assert listed["b"]["usable"]
        route = "/a/answers"
        assert client.refused("POST", route, {"message": "Hello"}) == listed["a"]["why"]
        assert client.say("b", "And then?", max_tokens=5)["text"]


def test_a_conversation_goes_on_with_another_model(
    client: Any, chats: Path, paths: dict[str, Path]
) -> None:
    """And says what it would in the terminal."""
    client.begin("talk", model="first", system="Be brief.")
    client.say("talk", "Hello there", max_tokens=12)
    client.say("talk", "Go on", max_tokens=60)
    client.got("/talk/pins", "POST", {"start": 8, "end": 12})
    before = client.got("/talk")
    with open_chats() as database:
        text = database.find("talk")
        assert text is not None
        database.copy(text, database, "before")
    moved = client.got("/talk", "PATCH", {"model": "second"})
    assert (moved["model"], moved["usable"], moved["system"]) == ("second", True, "Be brief.")
    assert said(moved) == said(before)
    events = client.events("/talk/answers", message="And now", max_tokens=5)
    reading = [event for event in events if event["type"] == "reading"]
    assert reading[0]["of"] > moved["tokens"]
    with tiny_llama(paths["second"], **several.CACHE) as llm:
        talk = stored(Conversation, "before", llm)
        assert "".join(talk.say("And now", max_tokens=5)) == events[-1]["turn"]["answer"]
    assert len(client.got("/talk")["turns_list"]) == 3
    assert client.got("/talk")["made_with"] == "second.gguf"
    end = client.got("/talk")["turns_list"][-1]["end"]
    # the map and the texts of tokens are those of the new model
    assert client.got("/talk/map")["tokens"] == end
    assert len(client.got("/talk/tokens")["texts"]) == end
    # and the copy goes on with the old one
    assert client.got("/before")["model"] == "first"
    client.say("before", "Still here", max_tokens=5)


def test_a_story_goes_on_with_another_model(client: Any, chats: Path) -> None:
    client.begin("tale", kind="story", model="first", text=STORY)
    client.done("/tale/passages", max_tokens=40)
    before = client.got("/tale")
    moved = client.got("/tale", "PATCH", {"model": "second"})
    assert (moved["model"], moved["text"]) == ("second", before["text"])
    assert moved["passages"] == before["passages"]
    done = client.done("/tale/passages", max_tokens=10)
    assert client.got("/tale")["text"] == before["text"] + done["text"]
    assert client.got("/tale/undo", "POST", {})["text"] == before["text"]


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_other_settings_read_the_same_tokens_again(
    client: Any, paths: dict[str, Path], kind: str
) -> None:
    """The tokens and the pins stay."""
    other = {**several.CACHE, "recent": 48}
    text = {"text": STORY} if kind == "story" else {}
    with (
        tiny_engine(paths["first"], texts=1, **other) as engine,
        clients.serving(engine) as elsewhere,
    ):
        elsewhere.begin("talk", kind=kind, **text)
        if kind == "story":
            elsewhere.done("/talk/passages", max_tokens=70)
        else:
            elsewhere.say("talk", "Hello there", max_tokens=70)
        pinned = elsewhere.got("/talk/pins", "POST", {"start": 20, "end": 24})["pinned"]
        elsewhere.server.app.state.sessions.let_go_idle(0)
    tokens = tokens_of("talk")
    assert client.got("/talk")["usable"]
    assert client.got("/talk/map")["pinned"] == pinned
    assert tokens_of("talk") == tokens


def test_the_model_that_it_has_reads_nothing_again(client: Any, chats: Path) -> None:
    client.begin("talk", model="first")
    client.say("talk", "Hello there", max_tokens=12)
    moved = client.got("/talk", "PATCH", {"model": "first"})
    assert moved["model"] == "first"
    events = client.events("/talk/answers", message="Go on " * 40, max_tokens=5)
    reading = [event for event in events if event["type"] == "reading"]
    assert reading[0]["of"] < moved["tokens"] + 250


def test_refusals(client: Any, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stays as it was."""
    client.begin("talk", model="first")
    client.say("talk", "Hello there", max_tokens=12)
    before = tokens_of("talk")
    assert "unknown model 'third'" in client.refused("PATCH", "/talk", {"model": "third"}, 404)
    assert "bert is an embedding model" in client.refused("PATCH", "/talk", {"model": "bert"})
    assert "there is no session" in client.refused("PATCH", "/nope", {"model": "first"}, 404)

    def fail(*_: Any, **__: Any) -> None:
        raise SessionError("no room for a session")

    monkeypatch.setattr("pyh2o.sessions.conversation.Conversation.store", fail)
    assert client.refused("PATCH", "/talk", {"model": "second"}) == "no room for a session"
    monkeypatch.undo()
    monkeypatch.setenv("PYH2O_CHATS", str(chats))
    assert tokens_of("talk") == before
    assert client.got("/talk")["model"] == "first"
    assert client.say("talk", "Go on", max_tokens=5)["turn"]["user"] == "Go on"


def test_where_there_is_one_model_only_it_goes_by_its_name(
    chats: Path, paths: dict[str, Path]
) -> None:
    with (
        tiny_engine(paths["first"], texts=1, **several.CACHE) as engine,
        clients.serving(engine) as client,
    ):
        client.begin("talk")
        assert "unknown model 'second'" in client.refused(
            "PATCH", "/talk", {"model": "second"}, 404
        )
        assert client.got("/talk", "PATCH", {"model": "tiny"})["model"] == "tiny"
