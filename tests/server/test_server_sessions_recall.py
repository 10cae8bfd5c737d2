"""Sessions that recall, and several models: each text with its own archive and its own model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o.engine import Engine
from pyh2o.sessions.conversation import Conversation
from pyh2o.sessions.saved import SavedChat
from pyh2o.system.archives import of_session
from pyh2o.writing.sampling import Sampling
from tiny_llama import tiny_llama

clients = needed("session_client", name="the server's packages")
models_of = needed("several_models", name="the server's packages")

CACHE: dict[str, Any] = {"n_ctx": 512, "hh": 88, "recent": 40, "slack": 24, "recall": 48}
MESSAGES = [f"Number {n}: what was it that I have said at the very beginning?" for n in range(4)]


@pytest.fixture
def recalling(model_path: Path) -> Iterator[Engine]:
    """One place, so that sessions take turns in it."""
    with tiny_engine(model_path, texts=1, **CACHE) as running:
        yield running


def alone_answers(path: Path, file: Path, system: str) -> Iterator[tuple[str, list[Any]]]:
    """The answers of the class, and what each of them has looked at."""
    with tiny_llama(path, **CACHE) as llm:
        talk = Conversation(llm, system=system, sampling=Sampling(seed=1))
        for message in MESSAGES:
            text = "".join(talk.say(message, max_tokens=40))
            recalled = [(each.start, each.end, each.text) for each in llm.recalled()]
            talk.save(file)
            yield text, recalled


@pytest.mark.parametrize("names", [["one"], ["one", "two"]], ids=["in its place", "by turns"])
def test_answers_are_those_of_the_class(
    chats: Path, recalling: Engine, model_path: Path, tmp_path: Path, names: list[str]
) -> None:
    expected = {
        name: list(alone_answers(model_path, tmp_path / f"{name}.h2o", f"You are {name}."))
        for name in names
    }
    assert any(recalled for answers in expected.values() for _, recalled in answers)
    with clients.serving(recalling) as client:
        for name in names:
            client.begin(name, system=f"You are {name}.")
        for number, message in enumerate(MESSAGES):
            for name in names:
                done = client.say(name, message, max_tokens=40)
                text, recalled = expected[name][number]
                assert done["text"] == text
                found = client.got(f"/{name}/recalled")
                assert [(each["start"], each["end"], each["text"]) for each in found] == recalled
                assert all(each["mass"] > 0 for each in found)
        for name in names:
            seen = client.got(f"/{name}/map")
            ((first, end),) = seen["archived"]
            assert first == 0
            assert 0 < end <= seen["recent_from"]
            # of an answer whose session was loaded since nobody knows
            assert (seen["kv"]["found_share"] > 0) == (len(names) == 1)
            assert of_session(SavedChat(name).path).exists()


def test_the_archive_goes_along(chats: Path, recalling: Engine, model_path: Path) -> None:
    """With another name, into a terminal, and away."""
    with clients.serving(recalling) as client:
        client.begin("old")
        for message in MESSAGES[:3]:
            client.say("old", message, max_tokens=40)
        archived = client.got("/old/map")["archived"]
        client.got("/old", "PATCH", {"name": "new"})
        assert client.got("/new/map")["archived"] == archived
        assert client.say("new", MESSAGES[3], max_tokens=5)["kv"]["bytes_archive"] > 0
    files = sorted(path.name for path in chats.iterdir())
    assert files == ["new.h2o", "new.h2o.archive"]
    with tiny_llama(model_path, **CACHE) as llm:
        Conversation.load(chats / "new.h2o", llm)
        assert llm.text.archive_trouble == ""
        assert llm.kv.archived > 0
    with clients.serving(recalling) as client:
        assert client.ask("DELETE", "/new").status == 204
    assert list(chats.iterdir()) == []


def test_a_session_goes_on_with_its_own_model(chats: Path, paths: dict[str, Path]) -> None:
    """Which is loaded for it; those of models that are not here say so."""
    loads = models_of.Loads(paths)
    with closing(loads.models("first", "second")) as models, clients.serving(models) as client:
        client.begin("a", model="first")
        client.begin("b", model="second")
        texts = {name: client.say(name, "Hello", max_tokens=20)["text"] for name in "ab"}
        assert {each["name"]: each["model"] for each in client.got("")["data"]} == {
            "a": "first",
            "b": "second",
        }
    with tiny_llama(paths["second"], **models_of.CACHE) as llm:
        talk = Conversation(llm, sampling=Sampling(seed=1))
        assert texts["b"] == "".join(talk.say("Hello", max_tokens=20))
    with closing(loads.models("second")) as models, clients.serving(models) as client:
        listed = {each["name"]: each for each in client.got("")["data"]}
        assert (listed["a"]["model"], listed["a"]["usable"]) == (None, False)
        assert listed["b"]["usable"]
        route = "/a/answers"
        assert client.refused("POST", route, {"message": "Hello"}) == listed["a"]["why"]
        assert client.say("b", "And then?", max_tokens=5)["text"]
