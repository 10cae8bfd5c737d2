"""Regenerate, undo, edit: as if it had not been said."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_turns import ChatTurns
from conversations import (
    EVICTING,
    ROOMY,
    SHORT,
    SYSTEM,
    check_positions,
    held_by_all,
    in_cache,
    said,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.models import demo_model_path
from tiny_llama import ONE_THREAD, tiny_llama


def test_nothing_is_read_again_while_rows_are_there(
    path: Path, drawn: list[list[int]], evaluated: list[int]
) -> None:
    llm = tiny_llama(path, **ROOMY)
    conversation = Conversation(llm)
    for message in ("one", "two", "three"):
        said(conversation.say(message, max_tokens=SHORT))
    parts = ChatTurns(llm.text.model, None)
    start = conversation.turns[2].start
    text = text_of(conversation)[:start]

    evaluated.clear()
    said(conversation.regenerate(max_tokens=SHORT))
    assert evaluated == [1] * SHORT
    assert text_of(conversation) == text + parts.next_turn("three") + drawn[-1]

    evaluated.clear()
    said(conversation.edit("four", max_tokens=SHORT))
    assert evaluated == [len(parts.next_turn("four"))] + [1] * (SHORT - 1)
    assert text_of(conversation) == text + parts.next_turn("four") + drawn[-1]
    assert conversation.turns[2].user == "four"

    evaluated.clear()
    assert conversation.undo().user == "four"
    assert text_of(conversation) == text
    assert conversation.undo().user == "two"
    assert [turn.user for turn in conversation.turns] == ["one"]
    said(conversation.say("five", max_tokens=1))
    assert evaluated == [len(parts.next_turn("five"))]

    evaluated.clear()
    conversation.clear()
    assert (conversation.turns, evaluated) == ((), [])
    said(conversation.say("six", max_tokens=1))
    assert in_cache(llm) == parts.first_turn("six")
    assert sum(evaluated) == len(parts.first_turn("six")) - len(parts.opening)


def test_a_first_message_may_be_one_token_with_what_is_before() -> None:
    llm = Llama(str(demo_model_path()), n_ctx=512, verbose=False, **ONE_THREAD)
    conversation = Conversation(llm)
    opening = conversation._template.opening
    for message in ("\n\nhello", "hello", "\n", "\n\n\n", ""):
        whole = ChatTurns(llm.text.model, None).first_turn(message)
        assert (whole[: len(opening)] == opening) == (not message.startswith("\n"))
        for change in (conversation.say, conversation.edit, conversation.edit):
            said(change(message, max_tokens=1))
            assert in_cache(llm) == whole
            check_positions(conversation)
        conversation.clear()
    said(conversation.say("\n", max_tokens=1))
    conversation.set_system(SYSTEM)
    check_positions(conversation)
    assert text_of(conversation)[:-1] == ChatTurns(llm.text.model, SYSTEM).first_turn("\n")


def test_half_of_the_recent_rows_are_enough_to_go_back(
    llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.text.model.snapshots, "mib", 0)
    recent = EVICTING["recent"]
    was_free: list[bool] = []
    for n_tokens in range(1, 70, 17):
        conversation = Conversation(llm)
        said(conversation.say("one", max_tokens=140))
        said(conversation.say("two", max_tokens=n_tokens))
        end = conversation.turns[0].end
        conversation.undo()
        was_free.append(llm.n_tokens > 0)
        if was_free[-1]:
            assert held_by_all(llm) >= set(range(end - recent // 2, end))
        assert len(conversation.unread) == (end - llm.n_tokens)
        assert (llm.n_tokens > end - 2) == was_free[-1]
    assert was_free[0]
    assert not was_free[-1]
