"""Parts of answers that are not said: thoughts have events of their own, calls are in the turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conversations import said
from forced_text import add_call, force
from many_texts import tiny_engine
from needed import needed
from pyh2o import Conversation
from pyh2o.sessions.chats import open_chats
from pyh2o.writing.tools import Call, Tool
from tiny_chat import OPENS_THOUGHTS, TOOLS, write_chat_gguf
from tiny_llama import tiny_llama

clients = needed("session_client", name="the server's packages")

CACHE: dict[str, Any] = {"n_ctx": 1000, "hh": 500, "recent": 300}


def test_thoughts_are_told_apart(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = force(monkeypatch)
    path = write_chat_gguf(tmp_path / "tiny.gguf", OPENS_THOUGHTS, n_layer=1)
    with tiny_engine(path, texts=1, **CACHE) as engine, clients.serving(engine) as client:
        client.begin("talk")
        texts.append("Well.</think>\n\nThree.")
        events = client.events("/talk/answers", message="1 + 2?")
        told = {
            kind: "".join(event["text"] for event in events if event["type"] == kind)
            for kind in ("reasoning", "text")
        }
        assert (told["reasoning"].strip(), told["text"]) == ("Well.", "Three.")
        turn = events[-1]["turn"]
        assert (turn["thoughts"].strip(), turn["answer"]) == ("Well.", "Three.")


def test_calls_of_a_session_are_shown(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = force(monkeypatch)
    path = write_chat_gguf(tmp_path / "tiny.gguf", TOOLS, n_layer=1)
    with tiny_llama(path, **CACHE) as llm:
        tool = Tool("add", "Adds.", {"type": "object", "properties": {"a": {}, "b": {}}})
        talk = Conversation(llm, tools=[tool])
        texts.extend([add_call(1, 2), "It is 3."])
        said(talk.say("1 + 2?"))
        said(talk.give_results([Call("add", talk.calls[0].arguments, "3")]))
        with open_chats() as database:
            talk.keep_in(database, "sums")
    with tiny_engine(path, texts=1, **CACHE) as engine, clients.serving(engine) as client:
        (turn,) = client.got("/sums")["turns_list"]
        (call,) = turn["steps"][0]["calls"]
        assert (call["name"], call["result"], turn["answer"]) == ("add", "3", "It is 3.")
        texts.append("Bye.")
        assert client.say("sums", "bye")["turn"]["answer"] == "Bye."
