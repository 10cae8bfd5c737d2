"""Sessions that begin with what writers have: a card, a lorebook, a note, a memory, a task."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from needed import needed
from pyh2o import Llama
from pyh2o.sessions.characters import PNG
from pyh2o.sessions.story import Story
from stored_texts import stored

needed("session_client", name="the server's packages")
SHORT = {"max_tokens": 6}
# Short: the system prompt has to fit the rows that stay.
CARD = {"name": "Ada", "description": "Old.", "first_mes": "Hi {{user}}!"}
BOOK = {"entries": {"0": {"key": ["comet"], "content": "{{char}} runs."}}}


def picture(card: dict[str, Any]) -> str:
    """The base64 of a PNG with a card; of a picture only the beginning."""
    text = b"chara\0" + base64.b64encode(json.dumps(card).encode())
    chunk = len(text).to_bytes(4, "big") + b"tEXt" + text + b"\0\0\0\0"
    return base64.b64encode(PNG + chunk).decode()


@pytest.mark.parametrize("card", [CARD, picture(CARD)], ids=["JSON", "PNG"])
def test_a_conversation_with_a_character(client: Any, card: Any) -> None:
    begun = client.begin(
        "stars", system="Be {{char}}.", card=card, lorebook=BOOK, user="Eve", note="Rhyme."
    )
    assert begun["system"] == "Be Ada.\n\nOld."
    assert (begun["note"], begun["lore_entries"]) == ("Rhyme.", 1)
    [first] = begun["turns_list"]
    assert (first["user"], first["answer"]) == ("[Ada begins the chat.]", "Hi Eve!")
    done = client.say("stars", "A comet!", **SHORT)
    assert done["turn"]["told"] == "[Ada runs.]\n\n[Rhyme.]"
    exported = client.got("/stars/export?format=json")["turns"]
    assert [turn.get("told") for turn in exported] == [None, "[Ada runs.]\n\n[Rhyme.]"]
    assert client.got("/stars", "PATCH", {"note": ""})["note"] == ""


def test_a_story_with_a_memory(client: Any, alone: Llama) -> None:
    begun = client.begin("tale", kind="story", text="It was", memory="It rains.")
    assert begun["text"] == "It was"
    done = client.done("/tale/passages", max_tokens=20)
    assert client.got("/tale")["text"] == "It was" + done["text"]
    story = stored(Story, "tale", alone)
    assert (story.memory, len(story.pins)) == ("It rains.", 1)


def test_a_story_that_is_asked_for(client: Any, alone: Llama) -> None:
    client.begin("tale", kind="story", text="Write of snow.", instruct=True)
    done = client.done("/tale/passages", max_tokens=20)
    assert client.got("/tale")["text"] == done["text"]
    story = stored(Story, "tale", alone)
    prompt = alone.detokenize(story.tokens[: story.n_prompt])
    assert prompt.lstrip() == b"user: Write of snow.\nassistant: "


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"card": {}}, "it has no name"),
        ({"card": "no base64"}, "card: give its JSON"),
        ({"card": base64.b64encode(b"x").decode()}, "is not a character card"),
        ({"lorebook": {}}, "is not a lorebook"),
        ({"memory": "a"}, "leave text out"),
        ({"kind": "story", "text": "a", "card": {}}, "a story has no system prompt"),
        ({"kind": "story", "text": "a", "memory": "b", "instruct": True}, "leave memory or"),
    ],
)
def test_what_no_session_begins_with(client: Any, body: dict[str, Any], reason: str) -> None:
    assert reason in client.refused("POST", "", {"name": "talk", **body})
    assert client.names() == []
