"""What a model is told with a message: read once, pinned, and remembered with the message."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversations import (
    EVICTING,
    SHORT,
    check_positions,
    in_cache,
    n_evaluated,
    said,
    text_of,
    without_kv,
)
from pyh2o import Conversation, Llama
from pyh2o.sessions.lorebooks import LoreEntry
from tiny_llama import tiny_llama

CACHE = {**EVICTING, "hh": 160}
LORE = (LoreEntry(("comet",), "Comets bring bad luck."),)
TOLD = "[Comets bring bad luck.]"


@pytest.fixture
def llm(path: Path) -> Llama:
    return tiny_llama(path, **CACHE)


def talk(llm: Llama, *messages: str) -> Conversation:
    conversation = Conversation(llm)
    conversation.lore, conversation.note = LORE, ""
    for message in messages:
        said(conversation.say(message, max_tokens=SHORT))
    return conversation


def in_text(conversation: Conversation) -> int:
    return conversation.llm.model.detokenize(text_of(conversation)).count(TOLD.encode())


def test_what_comes_up_is_read_once(llm: Llama) -> None:
    conversation = talk(llm, "hello", "look")
    before = n_evaluated(conversation)
    said(conversation.say("a comet", max_tokens=SHORT))
    turn = conversation.turns[-1]
    assert n_evaluated(conversation) - before == turn.end - turn.start  # and the newest token
    assert (turn.user, turn.told) == ("a comet", TOLD)
    for _ in range(20):
        said(conversation.say("the comet again", max_tokens=SHORT))
    assert in_text(conversation) == 1
    check_positions(conversation)
    assert llm.kv.compactions > 0
    assert conversation.pins == ((turn.start, turn.answer_start),)
    positions, _ = llm.kv_rows(0)
    assert all(set(range(*conversation.pins[0])) <= set(row.tolist()) for row in positions)


def test_it_goes_with_its_message(llm: Llama, tmp_path: Path) -> None:
    conversation = talk(llm, "hello", "a comet")
    said(conversation.regenerate(max_tokens=SHORT))
    assert in_text(conversation) == 1
    said(conversation.edit("a planet", max_tokens=SHORT))
    assert in_text(conversation) == 0
    said(conversation.edit("the comet", max_tokens=SHORT))
    assert in_text(conversation) == 1
    conversation.note = "Be sad."
    conversation.save(tmp_path / "talk.h2o")
    for reread in (False, True):
        file = tmp_path / "talk.h2o"
        again = Conversation.load(without_kv(file) if reread else file, llm)
        assert (again.lore, again.note) == (LORE, "Be sad.")
        assert again.turns == conversation.turns
        assert text_of(again) == text_of(conversation)
        said(again.say("and the comet", max_tokens=SHORT))
        assert again.turns[-1].told == "[Be sad.]"
        assert in_cache(llm) == text_of(again)[:-1]
    again.undo()
    again.undo()
    said(again.say("that comet", max_tokens=SHORT))
    assert again.turns[-1].told == f"{TOLD}\n\n[Be sad.]"


def test_pins_leave_half_of_the_heavy_rows(path: Path) -> None:
    with tiny_llama(path, **{**EVICTING, "hh": 240}) as llm:
        conversation = Conversation(llm)
        conversation.lore = tuple(LoreEntry((f"k{n}",), f"entry number {n}") for n in range(9))
        for n in range(9):
            said(conversation.say(f"k{n}", max_tokens=SHORT))
        n_pinned = sum(end - start for start, end in conversation.pins)
        assert 0 < n_pinned <= 240 // 2
