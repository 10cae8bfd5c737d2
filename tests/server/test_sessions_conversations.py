"""Conversations that a server keeps: said, changed, found again, and never lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from needed import needed
from pyh2o import Llama
from pyh2o.core.text import Text
from pyh2o.engine import Engine
from pyh2o.sessions.chats import locked, open_chats
from pyh2o.sessions.conversation import Conversation
from pyh2o.sessions.database import Database
from pyh2o.writing.sampling import Sampling
from stored_texts import stored
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama

clients = needed("session_client", name="the server's packages")
limits = needed("pyh2o.limits", name="the server's packages")
open_sessions = needed("pyh2o.server.sessions", name="the server's packages")
wait_until = needed("loopback", name="the server's packages").wait_until

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16}
SHORT = {"max_tokens": 12}


@contextmanager
def terminal_has(name: str) -> Iterator[tuple[Database, int]]:
    """Open a session as a terminal does."""
    with open_chats() as database:
        text = database.find(name)
        assert text is not None
        with locked(database, text):
            yield database, text


def turns_of(client: Any, name: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = client.got(f"/{name}")["turns_list"]
    return turns


def test_a_conversation_is_that_of_the_class(client: Any, alone: Llama, chats: Path) -> None:
    """Told as it comes, kept in the place in between, and saved when the end is told."""
    begun = client.begin("talk", system="Be brief.")
    assert (begun["name"], begun["kind"], begun["turns"]) == ("talk", "conversation", 0)
    assert (begun["model"], begun["usable"], begun["system"]) == ("tiny", True, "Be brief.")
    talk = Conversation(alone, system="Be brief.", sampling=Sampling(seed=1))
    for message in ("Hello there", "What is it that you said", "Go on then, and at length"):
        done = client.say("talk", message, max_tokens=40)
        "".join(talk.say(message, max_tokens=40))
        turn = talk.turns[-1]
        assert done["text"] == done["turn"]["answer"] == turn.answer
        assert (done["turn"]["end"], done["finish"]) == (turn.end, turn.finish)
        assert done["kv"]["position"] == alone.kv.position
        assert done["kv"]["compactions"] == alone.kv.compactions
        loaded = stored(Conversation, "talk", alone)
        assert loaded.turns == talk.turns
        talk = loaded
    assert done["kv"]["compactions"] > 0
    assert [turn["user"] for turn in turns_of(client, "talk")] == [t.user for t in talk.turns]


def test_nobody_else_goes_on_with_a_session_s_text(
    client: Any, engine: Engine, alone: Llama
) -> None:
    """It has pinned tokens: a completion that begins alike must not get them."""
    client.begin("talk", system="Be brief.")
    done = client.say("talk", "Hello", **SHORT)
    prompt = f"system: Be brief.\nuser: Hello\nassistant: {done['text']} and so on " * 3
    drawing = {"max_tokens": 30, "temperature": 0, "repeat_penalty": 1.1}
    body = {"prompt": prompt, **drawing}
    answer = client.server.post("/v1/completions", body).json["choices"][0]["text"]
    alone.reset()
    expected = alone.create_completion(prompt, **drawing)
    assert answer == expected["choices"][0]["text"]
    assert all(place.kv.pinned == 0 for place in engine.report() if place.kv.position > 60)


def test_undo_regenerate_edit_and_going_on(client: Any, alone: Llama) -> None:
    talk = Conversation(alone, sampling=Sampling(seed=1))
    client.begin("talk")
    route = "/talk/answers"
    for body, expected in (
        ({"message": "One"}, partial(talk.say, "One")),
        ({"regenerate": True}, talk.regenerate),
        ({"edit": "Two"}, partial(talk.edit, "Two")),
        ({"continue": True}, talk.go_on),
    ):
        done = client.done(route, **body, **SHORT)
        assert done["text"] == "".join(expected(**SHORT))
        assert (done["turn"]["answer"], done["turn"]["attempt"]) == (
            talk.turns[-1].answer,
            talk.turns[-1].attempt,
        )
    assert client.got("/talk/undo", "POST", {})["turns"] == 0
    for again, body in (("/talk/undo", {}), (route, {"regenerate": True})):
        assert "there is no message yet" in client.refused("POST", again, body)


def test_earlier_answers_come_back(client: Any, chats: Path, alone: Llama) -> None:
    client.begin("talk")
    assert "there is no message yet" in client.refused("PATCH", "/talk", {"attempt": 0})
    client.say("talk", "One", **SHORT)
    first = client.say("talk", "Two", max_tokens=40)["turn"]
    again = [client.done("/talk/answers", regenerate=True, **SHORT)["turn"] for _ in range(2)]
    assert [turn["attempts"] for turn in (first, *again)] == [[0], [0, 1], [0, 1, 2]]
    assert [turn["attempts"] for turn in turns_of(client, "talk")] == [[0], [0, 1, 2]]
    for attempt, turn in ((1, again[0]), (2, again[1]), (0, first)):
        chosen = client.got("/talk", "PATCH", {"attempt": attempt})
        assert chosen["turns_list"][-1] == turn | {"attempts": [0, 1, 2]}
        assert turns_of(client, "talk") == chosen["turns_list"]
        assert stored(Conversation, "talk", alone).turns[-1].answer == turn["answer"]
    client.refused("PATCH", "/talk", {"attempt": 3})
    assert client.refused("PATCH", "/nobody", {"attempt": 0}, 404)
    # what is said next is what would have been said to it
    talk = Conversation(alone, sampling=Sampling(seed=1))
    for text, limit in (("One", 12), ("Two", 40), ("Three", 12)):
        "".join(talk.say(text, max_tokens=limit))
    assert client.say("talk", "Three", **SHORT)["text"] == talk.turns[-1].answer
    assert turns_of(client, "talk")[-1]["attempts"] == [0]
    client.begin("tale", kind="story", text="Once")
    assert "no answers" in client.refused("PATCH", "/tale", {"attempt": 0})


def test_a_message_stays_that_the_end_of_the_server_leaves_unanswered(
    chats: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clients.serving(engine) as client:
        client.begin("talk")
        served = client.server.models.loaded()[0]
        read = Text.read

        def end(self: Text, *args: Any, **kwargs: Any) -> None:
            served.shutting_down = True
            read(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Text, "read", end)
            reply = client.ask("POST", "/talk/answers", {"message": "A long way " * 30})
        assert reply.status == 503
    with clients.serving(engine) as client:
        [turn] = turns_of(client, "talk")
        assert (turn["user"], turn["answer"]) == ("A long way " * 30, "")
        assert turn["finish"] == "interrupted"
        done = client.done("/talk/answers", **{"continue": True}, **SHORT)
        assert done["turn"]["answer"] == done["text"] != ""
        assert len(turns_of(client, "talk")) == 1


def test_the_system_prompt_and_the_sampling_change(client: Any, alone: Llama) -> None:
    client.begin("talk", system="Be brief.")
    client.say("talk", "Hello", **SHORT)
    other = {"temperature": 0, "dry_multiplier": 3, "dry_sequence_breakers": ["a"]}
    changed = client.got("/talk", "PATCH", {"system": "Be kind.", "sampling": other})
    assert (changed["system"], changed["sampling"]["temperature"]) == ("Be kind.", 0)
    assert changed["sampling"]["seed"] == 1
    events = client.events("/talk/answers", message="Well, then", **SHORT)
    talk = Conversation(alone, system="Be brief.", sampling=Sampling(seed=1))
    "".join(talk.say("Hello", **SHORT))
    talk.set_system("Be kind.")
    talk.sampling = Sampling(seed=1, **other)
    assert events[-1]["turn"]["answer"] == "".join(talk.say("Well, then", **SHORT))
    assert client.got("/talk", "PATCH", {"system": ""})["system"] is None


def test_lists_searches_names(client: Any) -> None:
    assert client.got("") == {"object": "list", "data": []}
    for name, message in (("apples", "Of Cider"), ("pears", "Of perry"), ("plums", "Of jam")):
        client.begin(name)
        client.say(name, message, **SHORT)
    listed = client.got("")["data"]
    assert [each["name"] for each in listed] == ["plums", "pears", "apples"]
    assert [each["first"] for each in listed] == ["Of jam", "Of perry", "Of Cider"]
    assert all(each["usable"] and each["why"] == "" for each in listed)
    assert [each["name"] for each in client.got("?q=CIDER+of")["data"]] == ["apples"]
    assert [each["name"] for each in client.got("?q=pear")["data"]] == ["pears"]
    assert client.got("/pears", "PATCH", {"name": "old pears"})["name"] == "old pears"
    assert client.refused("GET", "/pears", status=404).startswith("there is no session pears")
    assert client.say("old%20pears", "And again", **SHORT)["turn"]["user"] == "And again"
    taken = client.refused("PATCH", "/plums", {"name": "apples"}, 409)
    assert taken == "there is a session apples: give another name"
    assert client.refused("POST", "", {"name": "apples"}, 409) == taken
    assert client.ask("DELETE", "/apples").status == 204
    assert client.refused("DELETE", "/apples", status=404).startswith("there is no session apples")
    assert [each["name"] for each in client.got("")["data"]] == ["old pears", "plums"]
    unnamed = client.got("", "POST", {})["name"]
    assert client.got("", "POST", {})["name"] != unnamed


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("What's up, Doc?\nTell me!", "What's up, Doc? Tell me!"),
        ("../../etc/passwd", "../../etc/passwd"),
        ("word " * 100, "word word word word word word word word word"),
        ("x" * 1000, "x" * 48),
        ("हिन्दी में लिखो", "हिन्दी में लिखो"),
        ("海" * 100, "海" * 48),
    ],
)
def test_a_session_is_called_by_its_first_words(client: Any, first: str, name: str) -> None:
    """Whatever they are: a message that is to come, what was said, or a story's text."""
    bodies: list[dict[str, Any]] = [
        {"first": first},
        {"turns": [{"user": first, "answer": "yes"}]},
        {"kind": "story", "text": first},
    ]
    names = [client.got("", "POST", body)["name"] for body in bodies]
    assert names == [name, f"{name} (2)", f"{name} (3)"]


def test_one_that_a_terminal_has(client: Any) -> None:
    client.begin("talk")
    with clients.serving(client.server.models.named("tiny").model.engine) as other:
        message = other.refused("POST", "/talk/answers", {"message": "Hello"}, 409)
        assert message == "session talk is open in another chat: close that one first"
    client.server.app.state.sessions.let_go_idle(0)
    with terminal_has("talk"):
        for method, route, body in (
            ("POST", "/talk/answers", {"message": "Hello"}),
            ("POST", "/talk/undo", {}),
            ("PATCH", "/talk", {"name": "other"}),
            ("DELETE", "/talk", None),
        ):
            assert client.refused(method, route, body, 409) == message
        assert client.got("/talk")["usable"]
    assert client.say("talk", "Hello", **SHORT)["text"]


def test_a_session_is_let_go_when_nobody_asks(client: Any, alone: Llama) -> None:
    client.begin("talk")
    sessions = client.server.app.state.sessions
    sessions.let_go_idle()
    sessions._open["talk"].idle_since -= open_sessions.IDLE_SECONDS
    sessions.let_go_idle()
    with terminal_has("talk") as (database, text):
        talk = Conversation.open(database, text, alone)
        answer = "".join(talk.say("Hello", **SHORT))
        talk.store()
    assert client.done("/talk/answers", regenerate=True, **SHORT)["text"] != answer
    assert turns_of(client, "talk")[0]["user"] == "Hello"


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
def test_some_seeds_choose_a_new_one(client: Any, seed: int) -> None:
    """The session has it then."""
    for name in ("one", "other"):
        client.begin(name, sampling={"seed": seed})
    one, other = (client.got(f"/{name}")["sampling"]["seed"] for name in ("one", "other"))
    assert one != other
    assert 0 <= one < 2**32 - 1


def test_a_client_that_leaves_keeps_what_was_said(client: Any, engine: Engine) -> None:
    client.begin("talk", sampling={"seed": 4})
    with client.answering("/talk/answers", message="Tell me", max_tokens=10**6) as response:
        for _ in range(20):
            response.readline()
        refused = client.refused("POST", "/talk/answers", {"message": "And me"}, 409)
        assert turns_of(client, "talk") == []  # it is noted, and no turn yet
        assert refused.startswith("session talk is being answered: ")
        assert client.got("/talk/map")["tokens"] > 0  # others may look meanwhile
    wait_until(lambda: engine.n_running == 0)
    wait_until(lambda: len(turns_of(client, "talk")) == 1)
    (turn,) = turns_of(client, "talk")
    assert (turn["finish"], turn["user"]) == ("interrupted", "Tell me")
    assert turn["answer"]
    wait_until(lambda: not client.server.app.state.sessions._open["talk"].answering)
    more = client.done("/talk/answers", **{"continue": True}, **SHORT)
    assert more["turn"]["answer"].startswith(turn["answer"])


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_what_a_server_was_killed_over_is_there(
    client: Any, chats: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Answers and passages, also where it was killed again over the next one."""
    monkeypatch.setattr("pyh2o.sessions.text_session.SECONDS", 0.0)
    is_story = kind == "story"
    client.begin("one", kind=kind, text="It was" if is_story else "")
    for name, copy in (("one", "two"), ("two", "three")):
        route = f"/{name}/passages" if is_story else f"/{name}/answers"
        body = {} if is_story else {"message": f"to {name}"}
        with client.answering(route, max_tokens=10**6, **body) as response:
            while b'"type": "text"' not in response.readline():
                pass
            with open_chats() as database:
                text = database.find(name)
                assert text is not None
                database.copy(text, database, copy)
    session = client.got("/three")
    if is_story:
        assert len(session["text"]) > session["passages"][1] > len("It was")
        assert session["text"].startswith(client.got("/two")["text"][: session["passages"][1]])
        assert client.done("/three/passages", max_tokens=5)["text"]
    else:
        assert [turn["user"] for turn in session["turns_list"]] == ["to one", "to two"]
        assert client.done("/three/answers", **{"continue": True}, **SHORT)["turn"]


def test_an_answer_that_is_stopped(client: Any) -> None:
    client.begin("talk")
    with client.answering("/talk/answers", message="Tell me", max_tokens=10**6) as response:
        while b'"type": "text"' not in response.readline():
            pass
        assert client.ask("POST", "/talk/stop").status == 204
        lines = response.read().decode().splitlines()
    assert '"finish": "interrupted"' in lines[-4]
    assert lines[-2] == "data: [DONE]"
    assert turns_of(client, "talk")[0]["finish"] == "interrupted"


def test_a_message_that_is_stopped_while_it_is_read_is_taken_back(
    chats: Path, engine: Engine
) -> None:
    roomy = limits.Limits(prompt_tokens=10**6)
    with clients.serving(engine, limits=roomy) as client:
        client.begin("talk")
        long = "once upon a time " * 10_000
        with client.answering("/talk/answers", message=long, max_tokens=5) as response:
            assert client.ask("POST", "/talk/stop").status == 204
            lines = response.read().decode().splitlines()
        assert '"turn": null' in lines[-4]
        assert turns_of(client, "talk") == []
        assert client.say("talk", "Hello", **SHORT)["turn"]["user"] == "Hello"


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_an_answer_that_is_stopped_while_it_waits(client: Any, engine: Engine, kind: str) -> None:
    """It ends at once: the texts before it may take for hours."""
    route, body = "/talk/answers", {"message": "Tell me"}
    if kind == "story":
        route, body = "/talk/passages", {}
    client.begin("talk", kind=kind)
    ended: list[dict[str, Any]] = []
    with ExitStack() as others:
        for _ in range(engine.n_slots):
            others.enter_context(engine.slot())
        asking = Thread(target=lambda: ended.append(client.done(route, **body, **SHORT)))
        asking.start()
        wait_until(lambda: engine.n_waiting == 1)
        assert client.ask("POST", "/talk/stop").status == 204
        wait_until(lambda: engine.n_waiting == 0)
        asking.join()
    assert (ended[0]["turn"], ended[0]["finish"], ended[0]["text"]) == (None, "interrupted", "")
    assert client.done(route, **body, **SHORT)["text"]


def test_a_long_message_tells_how_far_it_is_read(client: Any) -> None:
    client.begin("talk")
    events = client.events("/talk/answers", message="once upon a time " * 100, max_tokens=3)
    reading = [event for event in events if event["type"] == "reading"]
    assert events[0] == reading[0]
    assert reading[0]["of"] > 500
    assert [event["done"] for event in reading] == sorted(event["done"] for event in reading)
    short = client.events("/talk/answers", message="And then?", max_tokens=3)
    assert "reading" not in [event["type"] for event in short]


def test_sessions_of_other_models(client: Any, model_path: Path, tmp_path: Path) -> None:
    """Other settings read the text again; another model has to be chosen."""
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=77, chat_template=CHAT_TEMPLATE)
    for path, name, cache in (
        (model_path, "larger", {**CACHE, "hh": 40}),
        (other, "of another", CACHE),
    ):
        with tiny_llama(path, **cache) as llm, open_chats() as database:
            talk = Conversation(llm)
            "".join(talk.say("Hello", max_tokens=5))
            talk.keep_in(database, name)
    summaries = {each["name"]: each for each in client.got("")["data"]}
    assert (summaries["larger"]["model"], summaries["of another"]["model"]) == ("tiny", None)
    assert summaries["larger"]["usable"]
    assert client.say("larger", "Hello", **SHORT)["text"]
    assert "made with the model other.gguf" in summaries["of another"]["why"]
    message = client.refused("POST", "/of%20another/answers", {"message": "Hello"})
    assert message == summaries["of another"]["why"]


@pytest.mark.parametrize(
    "body",
    [{}, {"message": " "}, {"message": "a", "edit": "b"}, {"regenerate": False}, {"message": 3}],
)
def test_bodies_that_make_no_sense(client: Any, body: dict[str, Any]) -> None:
    client.begin("talk")
    client.refused("POST", "/talk/answers", body)
    assert turns_of(client, "talk") == []


def test_pages_with_a_name_of_their_own_get_nothing(client: Any) -> None:
    """A name that a stranger has given to this machine would let his page read all that is said."""
    reply = client.server.get("/v1/sessions", Host=f"evil.example:{client.server.port}")
    assert reply.status == 403
    assert client.server.get("/v1/sessions", Host="localhost:80").status == 200


def test_files_are_for_the_user_s_eyes(client: Any, chats: Path) -> None:
    client.begin("talk")
    assert chats.stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------------------------------------
# Many of them
# ---------------------------------------------------------------------------------------------


def test_sessions_that_nobody_uses_are_closed(client: Any) -> None:
    most = 32
    names = [f"talk-{i}" for i in range(most + 8)]
    for name in names:
        client.begin(name)
        client.got(f"/{names[0]}/map")  # again and again, so it stays
    sessions = client.server.app.state.sessions
    assert set(sessions._open) == {names[0], *names[-most + 1 :]}
    assert client.say(names[1], "Hello?", max_tokens=3)["turn"]["user"] == "Hello?"
