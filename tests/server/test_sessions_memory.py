"""What a server tells of a session's memory: what is kept, and what is pinned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.core.rows import kept_tokens
from pyh2o.engine import Engine
from pyh2o.sessions.conversation import Conversation
from pyh2o.writing.sampling import Sampling
from stored_texts import stored
from tiny_llama import tiny_llama

clients = needed("session_client", name="the server's packages")


@pytest.fixture
def talk(client: Any) -> Any:
    """A client of a conversation that has evicted."""
    client.begin("talk", system="Be brief.")
    for number in range(4):
        client.say("talk", f"This is what I have to say, for the time {number}", max_tokens=30)
    return client


def loaded(llm: Llama) -> Conversation:
    return stored(Conversation, "talk", llm)


def test_the_map_is_what_the_cache_holds(talk: Any, alone: Llama) -> None:
    found = talk.got("/talk/map")
    conversation = loaded(alone)
    kept = kept_tokens(alone.text)
    assert found["tokens"] == len(conversation.tokens)
    assert (found["layers"], found["heads"], found["pairs"]) == (3, 2, 6)
    assert found["kept"]["positions"] == kept.positions.tolist()
    assert found["kept"]["rows"] == kept.rows.tolist()
    np.testing.assert_allclose(found["kept"]["scores"], kept.scores, atol=1e-5)
    assert found["recent_from"] == alone.n_tokens - alone.kv.recent
    assert found["pinned"] == [[0, alone.kv.pinned]]
    assert (found["archived"], found["recalled"]) == ([], [])
    kv = alone.kv
    numbers = (kv.position, kv.used, kv.budget, kv.capacity, kv.compactions, kv.bytes_total)
    names = ("position", "used", "budget", "capacity", "compactions", "bytes")
    assert tuple(found["kv"][name] for name in names) == numbers
    assert found["kv"]["found_share"] is None
    one = talk.got("/talk/map?layer=1&head=0")
    expected = kept_tokens(alone.text, layer=1, head=0)
    assert (one["pairs"], one["kept"]["positions"]) == (1, expected.positions.tolist())
    for query in ("layer=3", "layer=0&head=2", "layer=-1", "head=2"):
        assert "there is no " in talk.refused("GET", f"/talk/map?{query}")


def test_tokens_and_their_texts(talk: Any, alone: Llama) -> None:
    conversation = loaded(alone)
    n = len(conversation.tokens)
    found = talk.got("/talk/tokens")
    assert (found["start"], found["end"], len(found["texts"])) == (0, n, n)
    whole = "".join(found["texts"])
    assert found["ends"] == np.cumsum([len(text) for text in found["texts"]]).tolist()
    assert whole.removeprefix("<s>").startswith("system: Be brief.\nuser: This is what")
    for turn in conversation.turns:
        ends, start, end = found["ends"], turn.answer_start, turn.end
        assert whole[ends[start - 1] : ends[end - 1]].strip() == turn.answer.strip()
    part = talk.got("/talk/tokens?start=5&end=9")
    assert (part["texts"], part["ends"]) == (found["texts"][5:9], found["ends"][5:9])
    assert talk.got(f"/talk/tokens?start={n + 5}")["texts"] == []
    assert talk.got("/talk/tokens?start=3&end=10001")["end"] == n


def test_an_address_that_makes_no_sense_is_refused_like_a_body(talk: Any) -> None:
    for route, param in {
        "map?layer=": "layer", "tokens?start=a": "start", "tokens?start=-1": "start",
        "export?format=pdf": "format",
    }.items():  # fmt: skip
        reply = talk.ask("GET", f"/talk/{route}")
        assert reply.status == 400
        assert reply.error["param"] == param
        assert reply.error["message"].startswith(f"{param}: ")


def test_pins_hold_and_survive(client: Any, engine: Engine, alone: Llama) -> None:
    client.begin("talk")
    client.say("talk", "The word is mellon, friend", max_tokens=8)
    found = client.got("/talk/tokens")
    at = "".join(found["texts"]).index("mellon")
    start, end = (sum(each <= place for each in found["ends"]) for place in (at, at + 6))
    pinned = client.got("/talk/pins", "POST", {"start": start, "end": end})["pinned"]
    assert pinned[-1] == [start, end]
    assert "".join(found["texts"][start:end]) == "mellon"
    client.server.app.state.sessions.let_go_idle(0)  # it is loaded again
    for number in range(5):
        client.say("talk", f"Something else to talk about, number {number}", max_tokens=30)
    found = client.got("/talk/map")
    assert found["pinned"] == pinned
    rows = dict(zip(found["kept"]["positions"], found["kept"]["rows"], strict=True))
    assert [rows[position] for position in range(start, end)] == [6] * (end - start)
    conversation = loaded(alone)
    assert conversation.pins == ((start, end),)
    left = client.got("/talk/pins", "DELETE", {"start": start, "end": start + 1})["pinned"]
    assert left[-1] == [start + 1, end]
    gone = client.got("/talk/pins", "DELETE", {"start": start + 1, "end": end})["pinned"]
    assert gone == pinned[:-1]


def test_pins_that_make_no_sense(talk: Any) -> None:
    n = talk.got("/talk")["tokens"]
    before = talk.got("/talk/map")["pinned"]
    for body, reason in (
        ({"start": 0, "end": n + 1}, "cannot pin tokens from 0"),
        ({"start": 5, "end": 5}, "cannot pin tokens from 5 to 5"),
        ({"start": 0, "end": 120}, "do not fit the 32 rows that are not recent"),
        ({"start": 5}, "end is missing"),
    ):
        assert reason in talk.refused("POST", "/talk/pins", body)
    assert talk.got("/talk/map")["pinned"] == before


def test_a_pin_ends_where_the_text_is_taken_back(client: Any) -> None:
    client.begin("talk")
    client.say("talk", "One", max_tokens=4)
    end = client.say("talk", "Two", max_tokens=4)["turn"]["end"]
    pinned = client.got("/talk/pins", "POST", {"start": end - 3, "end": end})["pinned"]
    assert pinned[-1] == [end - 3, end]
    client.got("/talk/undo", "POST", {})
    assert client.got("/talk/map")["pinned"][-1][1] < end - 3
    client.done("/talk/answers", message="Three", max_tokens=4)


def test_the_map_costs_no_place_of_another(chats: Path, engine: Engine) -> None:
    """Looking at many sessions by turns changes nothing in any of them."""
    with clients.serving(engine) as client:
        for name in ("a", "b", "c"):
            client.begin(name)
            client.say(name, f"I am {name}, and this is a long story", max_tokens=60)
        maps = {name: client.got(f"/{name}/map") for name in ("a", "b", "c")}
        for name in ("c", "a", "b"):
            assert client.got(f"/{name}/map")["kept"] == maps[name]["kept"]


# ---------------------------------------------------------------------------------------------
# What comes back from an archive
# ---------------------------------------------------------------------------------------------

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
            assert end <= seen["recent_from"]
            # of an answer whose session was loaded since nobody knows
            assert (seen["kv"]["found_share"] > 0) == (len(names) == 1)


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
    with tiny_llama(model_path, **CACHE) as llm:
        stored(Conversation, "new", llm)
        assert llm.text.archive_trouble == ""
        assert llm.kv.archived > 0
    with clients.serving(recalling) as client:
        assert client.ask("DELETE", "/new").status == 204
    assert list((chats / "cache").iterdir()) == []
