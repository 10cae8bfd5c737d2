"""Character cards and lorebooks of other programs, and what a model is told of them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from pyh2o.errors import PyH2OError
from pyh2o.sessions.characters import PNG, read_character
from pyh2o.sessions.lorebooks import LoreEntry, note_for_message, read_lorebook
from pyh2o.sessions.turns import Turn

FIELDS: dict[str, Any] = {
    "name": "Ada",
    "description": "{{char}} counts stars{{// a comment }} for <USER>.",
    "personality": "exact",
    "scenario": "A tower at night.",
    "first_mes": "Good evening, {{user}}. I am {{Char}}.",
    "mes_example": "<START>\n{{user}}: How many?\n<BOT>: Four thousand.\n<START>\nNo more.",
}
NEWER: dict[str, Any] = {
    **FIELDS,
    "system_prompt": "Be terse. {{original}}",
    "post_history_instructions": "{{original}} No emoji.",
    "extensions": {"depth_prompt": {"prompt": "{{char}} is tired.", "depth": 4}},
    "character_book": {
        "entries": [
            {"keys": ["comet"], "content": "{{char}} fears comets.", "enabled": True,
             "insertion_order": 5, "extensions": {}},
            {"keys": ["x"], "content": "never", "enabled": False, "insertion_order": 1},
        ]
    },
}  # fmt: skip
SAID = "You are Ada, in a chat with Eve. Write what Ada says and does next."
ABOUT = (
    "Ada counts stars for Eve.\n\nAda's personality: exact\n\nScenario: A tower at night.\n\n"
    "How Ada talks: Eve: How many?\nAda: Four thousand.\n\nNo more."
)


def png(**texts: dict[str, Any]) -> bytes:
    """A picture of one grey dot, with texts."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    cards = [
        chunk(b"tEXt", name.encode() + b"\0" + base64.b64encode(json.dumps(card).encode()))
        for name, card in texts.items()
    ]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return b"".join(
        [PNG, head, *cards, chunk(b"IDAT", zlib.compress(b"\0\0")), chunk(b"IEND", b"")]
    )


def test_a_card_of_any_form(tmp_path: Path) -> None:
    newer = {"spec": "chara_card_v3", "spec_version": "3.0", "data": NEWER}
    forms = {
        "v1.json": json.dumps(FIELDS).encode(),
        "v1.png": png(chara=FIELDS),
        "v2.json": b"\xef\xbb\xbf" + json.dumps({**newer, "spec": "chara_card_v2"}).encode(),
        "v3.png": png(chara={**newer, "data": {**NEWER, "name": "Old"}}, ccv3=newer),
    }
    for name, data in forms.items():
        path = tmp_path / name
        path.write_bytes(data)
        card = read_character(path, user="Eve")
        assert (card.name, card.greeting) == ("Ada", "Good evening, Eve. I am Ada.")
        assert card.opening == (("[Ada begins the chat.]", card.greeting),)
        if name.startswith("v1"):
            assert (card.system, card.note, card.lore) == (f"{SAID}\n\n{ABOUT}", "", ())
        else:
            assert card.system == f"Be terse. {SAID}\n\n{ABOUT}"
            assert card.note == "No emoji.\n\nAda is tired."
            assert [entry.content for entry in card.lore] == ["Ada fears comets."]
    mine = read_character(tmp_path / "v1.json", user="Eve", instruction="Play {{char}}.")
    assert mine.system == f"Play Ada.\n\n{ABOUT}"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a character card"),
        (b"[]", "not a JSON object"),
        (b"{}", "it has no name"),
        (b"\xff\xfe", "not a character card"),
        (png(), "does not contain a card"),
        (png(chara=FIELDS)[:60], "not a character card"),
        (png(chara={}), "it has no name"),
        (json.dumps({**FIELDS, "character_book": {}}).encode(), "not a lorebook"),
    ],
)
def test_what_is_no_card(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "card"
    path.write_bytes(data)
    with pytest.raises(PyH2OError, match=reason):
        read_character(path)
    with pytest.raises(PyH2OError, match=r"cannot read .*: No such file"):
        read_character(tmp_path / "none.png")


# ---------------------------------------------------------------------------------------------
# Lorebooks
# ---------------------------------------------------------------------------------------------

WORLD_INFO = {
    "entries": {
        "0": {"uid": 0, "key": ["Dragon", "wyrm"], "keysecondary": ["gold"], "selective": True,
              "selectiveLogic": 3, "content": "Dragons sleep on gold.", "order": 100},
        "1": {"uid": 1, "key": [], "content": "It is winter.", "constant": True, "order": 1,
              "keysecondary": [], "disable": False},
        "2": {"uid": 2, "key": ["x"], "content": "off", "disable": True},
        "3": {"uid": 3, "key": ["/d[aeiou]g+/i"], "content": "Dogs bark.", "order": 50},
        "4": {"uid": 4, "key": ["Cat"], "content": "Cats purr.", "caseSensitive": True,
              "matchWholeWords": False},
    }
}  # fmt: skip
KOBOLD = {
    "prompt": "", "memory": "",
    "worldinfo": [
        {"key": "dragon, wyrm", "keysecondary": "", "keyanti": "toy", "content": "{{user}} runs.",
         "comment": None, "constant": False, "selective": False},
    ],
}  # fmt: skip


def lore_of(tmp_path: Path, book: Any) -> tuple[LoreEntry, ...]:
    path = tmp_path / "book.json"
    path.write_text(json.dumps(book))
    return read_lorebook(path, character="Ada", user="Eve")


def said(user: str, answer: str = "yes", inserted: str = "") -> Turn:
    return Turn(user, answer, "stop", 0, 1, 2, 0, inserted)


def test_what_comes_up_is_told(tmp_path: Path) -> None:
    lore = lore_of(tmp_path, WORLD_INFO)
    winter, dog, gold, cats = (
        "[It is winter.]", "[Dogs bark.]", "[Dragons sleep on gold.]", "[Cats purr.]"
    )  # fmt: skip
    assert note_for_message("hello", [], lore) == winter
    assert note_for_message("a dragon", [], lore) == winter
    assert note_for_message("a dragon, with GOLD", [], lore) == f"{winter}\n\n{gold}"
    assert note_for_message("dragons and golden", [], lore) == winter
    assert note_for_message("Catherine", [], lore) == f"{winter}\n\n{cats}"
    assert note_for_message("cat", [], lore) == winter
    before = [said("hm", "a DIGG, wyrm of gold", winter)]
    assert note_for_message("what", before, lore) == f"{dog}\n\n{gold}"
    assert note_for_message("what", [*before, said("and")], lore) == ""  # two turns ago
    before = [said("dragon gold", inserted=f"{winter}\n\n{gold}"), *[said("so")] * 20]
    assert note_for_message("dragon gold", before, lore) == ""  # it is in the text
    assert lore_of(tmp_path, {"spec": "lorebook_v3", "data": WORLD_INFO}) == lore


def test_a_lorebook_of_koboldcpp(tmp_path: Path) -> None:
    lore = lore_of(tmp_path, KOBOLD)
    assert note_for_message("the WYRM", [], lore) == "[Eve runs.]"
    assert note_for_message("the toy wyrm", [], lore) == ""


def test_a_note_comes_again() -> None:
    turns, told = [], []
    for _ in range(11):
        told.append(note_for_message("and", turns, (), "Be sad."))
        turns.append(said("and", inserted=told[-1]))
    assert [n for n, each in enumerate(told) if each] == [0, 4 + 1, 10]
    assert set(told) == {"", "[Be sad.]"}


@pytest.mark.parametrize("text", ["", "{}", '{"entries": 5}', '{"entries": [1]}', "[]"])
def test_what_is_no_lorebook(tmp_path: Path, text: str) -> None:
    path = tmp_path / "book.json"
    path.write_text(text)
    with pytest.raises(PyH2OError, match=r"book.json is not a lorebook"):
        read_lorebook(path, character="", user="")
    path.write_text(json.dumps({"entries": [{"key": ["/(/"], "content": "a"}]}))
    with pytest.raises(PyH2OError, match="a key is not a valid regular expression"):
        read_lorebook(path, character="", user="")


def test_a_pattern_that_is_none() -> None:
    """Also where somebody has edited a session."""
    with pytest.raises(ValueError, match="not a valid regular expression"):
        LoreEntry(("fine",), "content", second=("/(/",))
