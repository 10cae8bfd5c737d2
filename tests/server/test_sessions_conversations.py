"""Conversations of a server: answers, changes, the list, other programs, and a killed server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from many_texts import tiny_engine
from needed import needed
from pyh2o import Llama
from pyh2o.core.text import Text
from pyh2o.engine import Engine
from pyh2o.sessions.chats import locked, open_chats
from pyh2o.sessions.conversation import Conversation
from pyh2o.sessions.database import Database
from pyh2o.sessions.text_session import SECONDS
from pyh2o.writing.sampling import Sampling
from stored_texts import stored
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama

clients = needed("session_client", name="the server's packages")
limits = needed("pyh2o.limits", name="the server's packages")
open_sessions = needed("pyh2o.server.sessions", name="the server's packages")
serving = needed("serving_program", name="the server's packages")
wait_until = needed("loopback", name="the server's packages").wait_until

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16}
SHORT = {"max_tokens": 12}
ENDLESS = {"max_tokens": 10**6}


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


def wait_for_text(response: Any) -> None:
    """Wait until an answer has its first text."""
    while b'"type": "text"' not in response.readline():
        pass


# ---------------------------------------------------------------------------------------------
# Answers and changes
# ---------------------------------------------------------------------------------------------


def test_answers_equal_those_of_a_conversation(client: Any, alone: Llama) -> None:
    """They are stored before the response ends."""
    created = client.create("talk", system="Be brief.")
    assert (created["name"], created["kind"], created["turns"]) == ("talk", "conversation", 0)
    assert (created["model"], created["usable"], created["system"]) == ("tiny", True, "Be brief.")
    talk = Conversation(alone, system="Be brief.", sampling=Sampling(seed=1))
    for message in ("Hello there", "What is it that you said", "Go on then, and at length"):
        done = client.say("talk", message, max_tokens=40)
        "".join(talk.say(message, max_tokens=40))
        turn = talk.turns[-1]
        assert done["text"] == done["turn"]["answer"] == turn.answer
        assert (done["turn"]["end"], done["finish"]) == (turn.end, turn.finish)
        assert done["kv"]["position"] == alone.kv.position
        assert done["kv"]["compactions"] == alone.kv.compactions
        with open_chats() as database:
            stored_text = database.read(client.ids()["talk"])
        assert [message.answer for message in stored_text.messages] == [
            turn.answer for turn in talk.turns
        ]
    assert done["kv"]["compactions"] > 0


def test_completions_do_not_continue_the_text_of_a_session(
    client: Any, engine: Engine, alone: Llama
) -> None:
    """Its tokens are pinned."""
    client.create("talk", system="Be brief.")
    done = client.say("talk", "Hello", **SHORT)
    prompt = f"system: Be brief.\nuser: Hello\nassistant: {done['text']} and so on " * 3
    greedy = {"max_tokens": 30, "temperature": 0, "repeat_penalty": 1.1}
    body = {"prompt": prompt, **greedy}
    answer = client.server.post("/v1/completions", body).json["choices"][0]["text"]
    alone.reset()
    expected = alone.create_completion(prompt, **greedy)
    assert answer == expected["choices"][0]["text"]
    assert all(slot.kv.pinned == 0 for slot in engine.report() if slot.kv.position > 60)


def test_undo_regenerate_edit_and_continue(client: Any, alone: Llama) -> None:
    talk = Conversation(alone, sampling=Sampling(seed=1))
    client.create("talk")
    route = "/talk/answers"
    for body, expected in (
        ({"message": "One"}, partial(talk.say, "One")),
        ({"regenerate": True}, talk.regenerate),
        ({"edit": "Two"}, partial(talk.edit, "Two")),
        ({"continue": True}, talk.resume),
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


def test_replaced_answers_can_be_chosen(client: Any) -> None:
    client.create("talk")
    assert "there is no message yet" in client.refused("PATCH", "/talk", {"attempt": 0})
    first = client.say("talk", "One", max_tokens=40)["turn"]
    again = [client.done("/talk/answers", regenerate=True, **SHORT)["turn"] for _ in range(2)]
    assert [turn["attempts"] for turn in (first, *again)] == [[0], [0, 1], [0, 1, 2]]
    for attempt, turn in ((1, again[0]), (2, again[1]), (0, first)):
        chosen = client.got("/talk", "PATCH", {"attempt": attempt})
        assert chosen["turns_list"][-1] == turn | {"attempts": [0, 1, 2]}
        assert turns_of(client, "talk") == chosen["turns_list"]
    client.refused("PATCH", "/talk", {"attempt": 3})
    client.say("talk", "Two", **SHORT)
    assert [turn["attempts"] for turn in turns_of(client, "talk")] == [[0], [0]]


def test_changed_system_prompt_and_sampling_apply_to_the_next_answer(
    client: Any, alone: Llama
) -> None:
    client.create("talk", system="Be brief.")
    client.say("talk", "Hello", **SHORT)
    other = {"temperature": 0, "dry_multiplier": 3, "dry_sequence_breakers": ["a"]}
    changed = client.got("/talk", "PATCH", {"system": "Be kind.", "sampling": other})
    assert (changed["system"], changed["sampling"]["temperature"]) == ("Be kind.", 0)
    assert changed["sampling"]["seed"] == 1
    done = client.say("talk", "Well, then", **SHORT)
    talk = Conversation(alone, system="Be brief.", sampling=Sampling(seed=1))
    "".join(talk.say("Hello", **SHORT))
    talk.set_system("Be kind.")
    talk.sampling = Sampling(seed=1, **other)
    assert done["turn"]["answer"] == "".join(talk.say("Well, then", **SHORT))
    assert client.got("/talk", "PATCH", {"system": ""})["system"] is None


@pytest.mark.parametrize("seed", [-1, 2**32 - 1])
def test_a_random_seed_is_chosen_once(client: Any, seed: int) -> None:
    for name in ("one", "other"):
        client.create(name, sampling={"seed": seed})
    one, other = (client.got(f"/{name}")["sampling"]["seed"] for name in ("one", "other"))
    assert one != other
    assert 0 <= one < 2**32 - 1


def test_prefill_of_a_long_message_is_reported(client: Any) -> None:
    client.create("talk")
    events = client.events("/talk/answers", message="once upon a time " * 100, max_tokens=3)
    reading = [event for event in events if event["type"] == "reading"]
    assert events[0] == reading[0]
    assert reading[0]["of"] > 500
    assert [event["done"] for event in reading] == sorted(event["done"] for event in reading)
    short = client.events("/talk/answers", message="And then?", max_tokens=3)
    assert "reading" not in [event["type"] for event in short]


@pytest.mark.parametrize(
    "body",
    [{}, {"message": " "}, {"message": "a", "edit": "b"}, {"regenerate": False}, {"message": 3}],
)
def test_invalid_bodies_change_nothing(client: Any, body: dict[str, Any]) -> None:
    client.create("talk")
    client.refused("POST", "/talk/answers", body)
    assert turns_of(client, "talk") == []


# ---------------------------------------------------------------------------------------------
# The list
# ---------------------------------------------------------------------------------------------


def test_sessions_are_listed_searched_renamed_and_removed(client: Any) -> None:
    assert client.got("") == {"object": "list", "data": []}
    for name, message in (("apples", "Of Cider"), ("pears", "Of perry"), ("plums", "Of jam")):
        client.create(name)
        client.say(name, message, **SHORT)
    listed = client.got("")["data"]
    assert [each["name"] for each in listed] == ["plums", "pears", "apples"]
    assert [each["first"] for each in listed] == ["Of jam", "Of perry", "Of Cider"]
    assert all(each["usable"] and each["why"] == "" for each in listed)
    [cider] = client.got("?q=CIDER+of")["data"]
    assert cider.pop("snippet").startswith("Of Cider")
    assert cider == listed[2]
    assert [each["snippet"] for each in client.got("?q=pear")["data"]] == ["pears"]
    pears = listed[1]["id"]
    assert client.got(f"/{pears}", "PATCH", {"name": "old pears"})["name"] == "old pears"
    assert client.say(f"{pears}", "And again", **SHORT)["turn"]["user"] == "And again"
    taken = client.refused("PATCH", f"/{pears}", {"name": "apples"}, 409)
    assert taken == "there is a session apples: give another name"
    assert client.ask("DELETE", "/apples").status == 204
    assert client.names() == ["old pears", "plums"]
    gone = f"there is no session {listed[2]['id']}: GET /v1/sessions lists them"
    for method in ("GET", "DELETE"):
        assert client.refused(method, f"/{listed[2]['id']}", status=404) == gone
    for number in (0, 2**63):
        assert client.refused("GET", f"/{number}").startswith("id: ")


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("What's the capital?\n(France & Spain)/x", "What's the capital? (France & Spain)/x"),
        ("../../etc/passwd", "../../etc/passwd"),
        ("word " * 100, "word word word word word word word word word"),
        ("x" * 1000, "x" * 48),
        ("हिन्दी में लिखो", "हिन्दी में लिखो"),
        ("海" * 100, "海" * 48),
    ],
)
def test_the_first_words_become_the_title(client: Any, first: str, name: str) -> None:
    """They are of the first message, of an earlier turn, or of a story's text."""
    bodies: list[dict[str, Any]] = [
        {"first": first},
        {"turns": [{"user": first, "answer": "yes"}]},
        {"kind": "story", "text": first},
        {"name": name},
    ]
    created = [client.got("", "POST", body) for body in bodies]
    assert [each["name"] for each in created] == [name, *(f"{name} ({n})" for n in (2, 3, 4))]
    assert [client.got(f"/{each['id']}")["name"] for each in created] == client.names()
    unnamed = [client.got("", "POST", {})["name"] for _ in range(2)]
    assert len({*unnamed, ""}) == 3


def test_a_session_of_another_model_needs_that_model(
    client: Any, model_path: Path, tmp_path: Path
) -> None:
    """With other settings of the cache, the text is read again."""
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
    message = client.refused("POST", "/of another/answers", {"message": "Hello"})
    assert message == summaries["of another"]["why"]


def test_host_names_are_refused_without_an_api_key(client: Any) -> None:
    """The owner of a web page could let its name point to this machine, and read the sessions."""
    reply = client.server.get("/v1/sessions", Host=f"evil.example:{client.server.port}")
    assert reply.status == 403
    assert client.server.get("/v1/sessions", Host="localhost:80").status == 200


# ---------------------------------------------------------------------------------------------
# Slots, locks and other programs
# ---------------------------------------------------------------------------------------------


def test_a_session_is_open_in_one_program_at_a_time(client: Any) -> None:
    client.create("talk")
    client.say("talk", "Hello", **SHORT)
    message = "session talk is open in another chat: close that one first"
    with clients.serving(client.server.models.named("tiny").model.engine) as other:
        assert other.refused("POST", "/talk/answers", {"message": "Hello"}, 409) == message
    client.server.app.state.sessions.close_idle(0)
    with terminal_has("talk"):
        for method, route, body in (
            ("POST", "/talk/answers", {"message": "Hello"}),
            ("POST", "/talk/undo", {}),
            ("DELETE", "/talk", None),
        ):
            assert client.refused(method, route, body, 409) == message
        assert client.got("/talk")["usable"]
        assert client.got("/talk", "PATCH", {"name": "other"})["name"] == "other"
    assert client.say("other", "Hello", **SHORT)["text"]


def test_idle_sessions_are_closed(client: Any, alone: Llama) -> None:
    """A terminal can then continue them."""
    client.create("talk")
    client.say("talk", "Hello", **SHORT)
    sessions, number = client.server.app.state.sessions, client.ids()["talk"]
    sessions.close_idle()
    sessions._open[number].idle_since -= open_sessions.IDLE_SECONDS
    sessions.close_idle()
    with terminal_has("talk") as (database, text):
        talk = Conversation.open(database, text, alone)
        assert talk.reread_reason == ""
        answer = "".join(talk.say("And now", **SHORT))
        talk.store()
    assert client.done("/talk/answers", regenerate=True, **SHORT)["text"] != answer
    assert [turn["user"] for turn in turns_of(client, "talk")] == ["Hello", "And now"]


def test_only_the_newest_unused_sessions_stay_open(client: Any) -> None:
    numbers = [client.create()["id"] for _ in range(open_sessions.MAX_IDLE + 8)]
    for number in numbers:
        client.got(f"/{number}/map")
        client.got(f"/{numbers[0]}/map")
    newest = numbers[-open_sessions.MAX_IDLE + 1 :]
    assert set(client.server.app.state.sessions._open) == {numbers[0], *newest}
    assert client.say(f"{numbers[1]}", "Hello?", max_tokens=3)["turn"]["user"] == "Hello?"


@pytest.mark.parametrize("how", ["another text", "idle", "closed model", "shutdown"])
def test_the_kv_cache_is_stored_when_the_slot_is_given_up(
    chats: Path, model_path: Path, alone: Llama, how: str
) -> None:
    """An answer stores it only if the text has grown by an eighth."""
    with tiny_engine(model_path, texts=1, **CACHE) as engine:
        with clients.serving(engine) as client:
            client.create("talk")
            client.say("talk", "Hello there " * 20, max_tokens=60)
            [file] = (chats / "cache").glob("*.kv")
            before = file.read_bytes()
            client.say("talk", "Yes", max_tokens=3)
            assert file.read_bytes() == before
            if how == "another text":
                client.server.post("/v1/completions", {"prompt": "Once", "max_tokens": 3})
            elif how == "idle":
                client.server.app.state.sessions.close_idle(0)
            elif how == "closed model":
                engine.close()
            assert (file.read_bytes() == before) == (how == "shutdown")
        talk = stored(Conversation, "talk", alone)
        assert talk.reread_reason == ""
        assert alone.n_tokens >= talk.turns[-1].end - 1


def test_a_disconnected_client_keeps_its_text(client: Any, engine: Engine) -> None:
    client.create("talk", sampling={"seed": 4})
    with client.answering("/talk/answers", message="Tell me", **ENDLESS) as response:
        for _ in range(20):
            response.readline()
        refused = client.refused("POST", "/talk/answers", {"message": "And me"}, 409)
        assert turns_of(client, "talk") == []  # an answer in progress is not a turn yet
        assert refused.startswith("session talk is being answered: ")
        assert client.got("/talk/map")["tokens"] > 0  # also during the answer
    wait_until(lambda: engine.n_running == 0)
    wait_until(lambda: len(turns_of(client, "talk")) == 1)
    (turn,) = turns_of(client, "talk")
    assert (turn["finish"], turn["user"]) == ("interrupted", "Tell me")
    assert turn["answer"]
    number = client.ids()["talk"]
    wait_until(lambda: not client.server.app.state.sessions._open[number].answering)
    more = client.done("/talk/answers", **{"continue": True}, **SHORT)
    assert more["turn"]["answer"].startswith(turn["answer"])


def test_stop_ends_an_answer(client: Any) -> None:
    client.create("talk")
    with client.answering("/talk/answers", message="Tell me", **ENDLESS) as response:
        wait_for_text(response)
        assert client.ask("POST", "/talk/stop").status == 204
        lines = response.read().decode().splitlines()
    assert '"finish": "interrupted"' in lines[-4]
    assert lines[-2] == "data: [DONE]"
    assert turns_of(client, "talk")[0]["finish"] == "interrupted"


def test_a_message_stopped_during_prefill_is_removed(chats: Path, engine: Engine) -> None:
    with clients.serving(engine, limits=limits.Limits(prompt_tokens=10**6)) as client:
        client.create("talk")
        long = "once upon a time " * 10_000
        with client.answering("/talk/answers", message=long, max_tokens=5) as response:
            assert client.ask("POST", "/talk/stop").status == 204
            lines = response.read().decode().splitlines()
        assert '"turn": null' in lines[-4]
        assert turns_of(client, "talk") == []
        assert client.say("talk", "Hello", **SHORT)["turn"]["user"] == "Hello"


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_stop_ends_an_answer_that_waits_for_a_slot(client: Any, engine: Engine, kind: str) -> None:
    route, body = "/talk/answers", {"message": "Tell me"}
    if kind == "story":
        route, body = "/talk/passages", {}
    client.create("talk", kind=kind)
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


# ---------------------------------------------------------------------------------------------
# The end of the server
# ---------------------------------------------------------------------------------------------


def test_shutdown_keeps_an_unanswered_message(
    chats: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clients.serving(engine) as client:
        client.create("talk")
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


@pytest.mark.parametrize("kind", ["conversation", "story"])
def test_kill_9_during_an_answer_loses_at_most_two_seconds(
    chats: Path, model_path: Path, kind: str
) -> None:
    is_story = kind == "story"
    options = ("--model", model_path, "--port", 0, "--ctx", 256, "--hh", 32, "--recent", 32)
    route, body = ("/talk/passages", {}) if is_story else ("/talk/answers", {"message": "Hello"})
    with serving.Program(*options, PYH2O_CHATS=str(chats)) as program:
        client = clients.SessionClient(program)
        client.create("talk", kind=kind, text="It was" if is_story else "")
        with client.answering(route, **body, **ENDLESS) as response:
            end, n_received = time.monotonic() + SECONDS + 1, 0
            while time.monotonic() < end:
                n_received += b'"type": "text"' in response.readline()
            program.process.kill()
            program.process.wait()
    with serving.Program(*options, PYH2O_CHATS=str(chats)) as program:
        client = clients.SessionClient(program)
        session = client.got("/talk")
        assert session["tokens"] > n_received // 4 > 10
        if is_story:
            text = session["text"] + client.done(route, max_tokens=5)["text"]
            assert client.got("/talk")["text"] == text
        else:
            [turn] = session["turns_list"]
            assert (turn["user"], turn["finish"]) == ("Hello", "interrupted")
            done = client.done(route, **{"continue": True}, **SHORT)
            assert done["turn"]["answer"] == turn["answer"] + done["text"]
