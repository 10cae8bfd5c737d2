"""Chats of other programs: what is taken of an export, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyh2o.errors import SessionError
from pyh2o.sessions.imports import OPENING, PICTURE, ImportedChat, read_chats


def lines(*records: Any) -> str:
    return "\n".join(json.dumps(record) for record in records)


def line(text: str, *, user: bool = False, **more: Any) -> dict[str, Any]:
    return {"name": "Ann" if user else "Seraphina", "is_user": user, "mes": text, **more}


HEAD = {"user_name": "Ann", "character_name": "Seraphina", "create_date": "2026-11-1"}


def test_a_chat_of_sillytavern() -> None:
    """Its greeting answers nothing, remarks are left out, and what follows is one message."""
    text = lines(
        HEAD,
        line("*She smiles.* Welcome!"),
        line("Where am I?", user=True),
        line("", user=True),
        line("Hidden", is_system=True),
        line("And who are you?", user=True),
        line("I am Seraphina.", swipes=["another", "I am Seraphina."], swipe_id=1),
        line("Thank you", user=True),
    )
    [chat] = read_chats("\ufeff" + text + "\n")
    asked = "Where am I?\n\nAnd who are you?"
    turns = ((OPENING, "*She smiles.* Welcome!"), (asked, "I am Seraphina."))
    assert chat == ImportedChat("Seraphina", turns, "Thank you")


def node(parent: str | None, role: str, *parts: Any, **message: Any) -> dict[str, Any]:
    content = {"content_type": "text", "parts": list(parts)}
    return {"parent": parent, "message": {"author": {"role": role}, "content": content, **message}}


MAPPING = {
    "root": {"parent": None, "message": None},
    "a": node("root", "system", ""),
    "b": node("a", "user", "Draw a cat", {"content_type": "image_asset_pointer"}),
    "c": node("b", "assistant", "an earlier answer"),
    "d": node("b", "assistant", "{}", recipient="dalle.text2im"),
    "e": node("d", "tool", "a file"),
    "f": node("e", "assistant", "A thought", content={"content_type": "thoughts", "thoughts": []}),
    "g": node("f", "assistant", "Here it is."),
    "h": node("g", "user", "hidden", metadata={"is_visually_hidden_from_conversation": True}),
    "i": node("h", "user", "And a dog?"),
}


def test_chats_of_openai() -> None:
    """Of each the path that was on the screen last; those without an answer are none."""
    tree = {"title": "Cats", "mapping": MAPPING, "current_node": "i"}
    earlier = {"title": None, "mapping": MAPPING, "current_node": "c"}
    empty = {"title": "Empty", "mapping": {"root": MAPPING["root"]}, "current_node": "root"}
    message = f"Draw a cat\n\n{PICTURE}"
    assert read_chats(json.dumps([tree, empty, earlier])) == [
        ImportedChat("Cats", ((message, "Here it is."),), "And a dog?"),
        ImportedChat("", ((message, "an earlier answer"),), ""),
    ]
    # a circle ends, too
    looped = {**MAPPING, "root": {"parent": "i", "message": None}}
    assert len(read_chats(json.dumps([{**tree, "mapping": looped}]))) == 1


def test_halves_of_characters_are_no_text() -> None:
    head = {"character_name": "\ud83d"}
    [chat] = read_chats(lines(head, line("\ud83d", user=True), line("so")))
    assert chat == ImportedChat("?", (("?", "so"),), "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "roses are red",
        "[]",
        "[1]",
        "null",
        "{}",
        lines(HEAD),
        lines(HEAD, line("Welcome", user=True)),
        lines(HEAD, {"mes": "x"}),
        json.dumps([{"mapping": 3}]),
        json.dumps([{"mapping": {"a": {"message": 3}}}]),
        json.dumps([{"mapping": {"a": node(None, "user")}, "current_node": ["a"]}]),
        "[" * 100_000,
    ],
)
def test_what_is_no_export_is_refused(text: str) -> None:
    with pytest.raises(SessionError, match=r"no chats found in this file: give a SillyTavern"):
        read_chats(text)
