"""What a server tells of a session's memory: what is kept, and what is pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needed import needed
from pyh2o import Llama
from pyh2o.cache.rows import kept_tokens
from pyh2o.engine import Engine
from pyh2o.sessions.conversation import Conversation
from pyh2o.sessions.saved import SavedChat

clients = needed("session_client", name="the server's packages")


@pytest.fixture
def talk(client: Any) -> Any:
    """A client of a conversation that has evicted."""
    client.begin("talk", system="Be brief.")
    for number in range(4):
        client.say("talk", f"This is what I have to say, for the time {number}", max_tokens=30)
    return client


def loaded(llm: Llama) -> Conversation:
    return Conversation.load(SavedChat("talk").path, llm)


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
        "tokens/a": "position", "export?format=pdf": "format",
    }.items():  # fmt: skip
        reply = talk.ask("GET", f"/talk/{route}")
        assert reply.status == 400
        assert reply.error["param"] == param
        assert reply.error["message"].startswith(f"{param}: ")


def test_one_token(talk: Any, alone: Llama) -> None:
    loaded(alone)
    found, texts = talk.got("/talk/map"), talk.got("/talk/tokens")["texts"]
    rows = [alone.kv_rows(layer)[0] for layer in range(3)]
    kept = dict(zip(found["kept"]["positions"], found["kept"]["rows"], strict=True))
    scores = dict(zip(found["kept"]["positions"], found["kept"]["scores"], strict=True))
    gone = next(position for position in range(found["kv"]["position"]) if position not in kept)
    some = found["kept"]["positions"][:: len(kept) // 6]
    for position in (0, gone, *some, found["kv"]["position"] - 1):
        token = talk.got(f"/talk/tokens/{position}")
        held = [
            [layer, head]
            for layer, of_layer in enumerate(rows)
            for head in range(2)
            if position in of_layer[head]
        ]
        assert (token["held"], token["rows"]) == (held, kept.get(position, 0))
        assert token["score"] == pytest.approx(scores.get(position, 0), abs=1e-4)
        assert (token["text"], token["pairs"]) == (texts[position], 6)
        assert token["recent"] == (position >= found["recent_from"])
        assert token["pinned"] == (position < found["pinned"][0][1])
        assert (token["archived"], token["recalled"]) == (False, False)
    talk.refused("GET", f"/talk/tokens/{found['tokens']}", status=404)


def test_pins_hold_and_survive(client: Any, engine: Engine, alone: Llama) -> None:
    client.begin("talk")
    client.say("talk", "The word is mellon, friend", max_tokens=8)
    pinned = client.got("/talk/pins", "POST", {"text": "mellon"})["pinned"]
    texts = client.got("/talk/tokens")["texts"]
    start, end = pinned[-1]
    assert "mellon" in "".join(texts[start:end])
    assert "mellon" not in "".join(texts[start + 1 : end])
    client.server.app.state.sessions.close()  # it is loaded again
    for number in range(5):
        client.say("talk", f"Something else to talk about, number {number}", max_tokens=30)
    found = client.got("/talk/map")
    assert found["pinned"] == pinned
    rows = dict(zip(found["kept"]["positions"], found["kept"]["rows"], strict=True))
    assert [rows[position] for position in range(start, end)] == [6] * (end - start)
    assert client.got(f"/talk/tokens/{start}")["pinned"]
    conversation = loaded(alone)
    assert conversation.pins == ((start, end),)
    # all of it is read again, and they still are
    conversation.set_system("Be brief.")
    assert conversation.pins[0][1] - conversation.pins[0][0] == end - start
    (a, b), tokens = conversation.pins[0], conversation.tokens
    word = alone.detokenize(tokens[a:b]).decode()
    assert "mellon" in word
    "".join(conversation.say("And now?", max_tokens=40))
    assert kept_tokens(alone.text).rows[
        np.isin(kept_tokens(alone.text).positions, range(a, b))
    ].tolist() == [6] * (b - a)
    left = client.got("/talk/pins", "DELETE", {"start": start, "end": start + 1})["pinned"]
    assert left[-1] == [start + 1, end]
    assert client.got("/talk/pins", "DELETE", {"text": "mellon"})["pinned"] == pinned[:-1]


def test_pins_that_make_no_sense(talk: Any) -> None:
    n = talk.got("/talk")["tokens"]
    before = talk.got("/talk/map")["pinned"]
    for body, reason in (
        ({"start": 0, "end": n + 1}, "there are no tokens from 0"),
        ({"start": 5, "end": 5}, "there are no tokens from 5 to 5"),
        ({"start": 0, "end": 120}, "do not fit the 32 rows that are not recent"),
        ({"text": "nowhere at all"}, "it is nowhere in the session's text"),
        ({"start": 5}, "give start and end, or text"),
        ({}, "give start and end, or text"),
    ):
        assert reason in talk.refused("POST", "/talk/pins", body)
    assert talk.got("/talk/map")["pinned"] == before


def test_a_pin_ends_where_the_text_is_taken_back(client: Any) -> None:
    client.begin("talk")
    client.say("talk", "One", max_tokens=4)
    end = client.say("talk", "Two", max_tokens=4)["turn"]["end"]
    assert client.got("/talk/pins", "POST", {"start": end - 3, "end": end})["pinned"][-1] == [
        end - 3,
        end,
    ]
    client.got("/talk/undo", "POST", {})
    assert client.got("/talk/map")["pinned"][-1][1] < end - 3
    client.done("/talk/answers", message="Three", max_tokens=4)


def test_the_map_costs_no_place_of_another(chats: Path, engine: Engine) -> None:
    """Looking at many sessions by turns changes nothing in any of them."""
    with clients.serving(engine) as client:
        for name in ("a", "b", "c"):
            client.begin(name)
            client.say(name, f"I am {name}, and this is a long story", max_tokens=60)
        before = {path.name: path.read_bytes() for path in chats.glob("*.h2o")}
        maps = {name: client.got(f"/{name}/map") for name in ("a", "b", "c")}
        for name in ("c", "a", "b"):
            assert client.got(f"/{name}/map")["kept"] == maps[name]["kept"]
        assert {path.name: path.read_bytes() for path in chats.glob("*.h2o")} == before
