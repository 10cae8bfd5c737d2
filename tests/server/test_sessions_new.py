"""New sessions with a character card, a lorebook, a note, a memory or an instruction."""

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
# Short, because the system prompt is pinned.
CARD = {"name": "Ada", "description": "Old.", "first_mes": "Hi {{user}}!"}
BOOK = {"entries": {"0": {"key": ["comet"], "content": "{{char}} runs."}}}


def picture(card: dict[str, Any]) -> str:
    """Return the base64 of the start of a PNG file with a card."""
    text = b"chara\0" + base64.b64encode(json.dumps(card).encode())
    chunk = len(text).to_bytes(4, "big") + b"tEXt" + text + b"\0\0\0\0"
    return base64.b64encode(PNG + chunk).decode()


@pytest.mark.parametrize("card", [CARD, picture(CARD)], ids=["JSON", "PNG"])
def test_a_conversation_can_start_with_a_character_card(client: Any, card: Any) -> None:
    created = client.create(
        "stars", system="Be {{char}}.", card=card, lorebook=BOOK, user="Eve", note="Rhyme."
    )
    assert created["system"] == "Be Ada.\n\nOld."
    assert (created["note"], created["lore_entries"]) == ("Rhyme.", 1)
    [first] = created["turns_list"]
    assert (first["user"], first["answer"]) == ("[Ada begins the chat.]", "Hi Eve!")
    done = client.say("stars", "A comet!", **SHORT)
    assert done["turn"]["inserted"] == "[Ada runs.]\n\n[Rhyme.]"
    exported = client.got("/stars/export?format=json")["turns"]
    assert [turn.get("inserted") for turn in exported] == [None, "[Ada runs.]\n\n[Rhyme.]"]
    assert client.got("/stars", "PATCH", {"note": ""})["note"] == ""


def test_the_memory_of_a_story_is_pinned(client: Any, alone: Llama) -> None:
    created = client.create("tale", kind="story", text="It was", memory="It rains.")
    assert created["text"] == "It was"
    done = client.done("/tale/passages", max_tokens=20)
    assert client.got("/tale")["text"] == "It was" + done["text"]
    story = stored(Story, "tale", alone)
    assert (story.memory, len(story.pins)) == ("It rains.", 1)


def test_a_story_can_start_with_an_instruction(client: Any, alone: Llama) -> None:
    client.create("tale", kind="story", text="Write of snow.", instruct=True)
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
def test_invalid_bodies_create_no_session(client: Any, body: dict[str, Any], reason: str) -> None:
    assert reason in client.refused("POST", "", {"name": "talk", **body})
    assert client.names() == []
