"""`pyh2o chat`: character cards and lorebooks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_fakes import Output, run
from scripted_chat import RecordedConversation, ScriptedModel, notes_of

pytestmark = pytest.mark.usefixtures("surroundings")

CARD = {
    "name": "Ada",
    "description": "{{char}} counts stars.",
    "first_mes": "Hello {{user}}!",
    "post_history_instructions": "Be brief.",
}
BOOK = {"entries": {"0": {"key": ["comet"], "content": "{{char}} fears comets."}}}
SYSTEM = "You are Ada, in a chat with Eve. Write what Ada says and does next.\n\nAda counts stars."


@pytest.fixture
def files() -> tuple[str, ...]:
    Path("ada.json").write_text(json.dumps(CARD))
    Path("book.json").write_text(json.dumps(BOOK))
    return ("--card", "ada.json", "--lorebook", "book.json", "--user", "Eve")


def test_a_card_starts_the_chat(model: ScriptedModel, files: tuple[str, ...]) -> None:
    model.say("Four.", "No!")
    output = run("chat", *files, "--session", "stars", stdin="How many?\nA comet!\n/note\n")
    assert output.text == "Hello Eve!\nFour.\nNo!\n"
    assert notes_of(output)[-1] == "inserted every few messages: Be brief."
    conversation = RecordedConversation.last
    assert conversation.system == SYSTEM
    assert [turn.inserted for turn in conversation.turns] == [
        "", "[Be brief.]", "[Ada fears comets.]"
    ]  # fmt: skip
    model.say("Yes.", "Well.")
    again = run("chat", "--session", "stars", stdin="And a comet?\n/note Rhyme.\nSo?\n")
    assert again.text == "Yes.\nWell.\n"
    conversation = RecordedConversation.last
    assert [turn.inserted for turn in conversation.turns[-2:]] == ["", "[Rhyme.]"]
    assert (conversation.system, conversation.note) == (SYSTEM, "Rhyme.")
    read_again = run("chat", *files, "--session", "stars", stdin='/note ""\n')
    assert "read again" not in read_again.notes  # it is the same card
    assert notes_of(read_again)[-1] == "no note: /note TEXT sets one"


def test_a_system_prompt_comes_before_the_card(
    model: ScriptedModel, files: tuple[str, ...]
) -> None:
    run("chat", *files, "-s", "Play {{char}}.", stdin="")
    assert RecordedConversation.last.system == "Play Ada.\n\nAda counts stars."


def test_a_file_that_is_not_a_card_is_refused(model: ScriptedModel) -> None:
    Path("x.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    output = run("chat", "--card", "x.png", stdin="Hello\n")
    reason = "the picture does not contain a card"
    said = f"error: x.png is not a character card (PNG or JSON): {reason}\n"
    assert output == Output(1, "", said)
