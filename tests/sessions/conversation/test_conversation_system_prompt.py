"""The system prompt: it stays, or is refused; and who else gets places."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_turns import ChatTurns
from conversations import (
    EVICTING,
    SHORT,
    SYSTEM,
    check_positions,
    held_by_all,
    in_cache,
    said,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.errors import SettingsError
from tiny_llama import tiny_llama


@pytest.mark.parametrize("system", [None, SYSTEM])
def test_the_opening_is_never_evicted(path: Path, system: str | None) -> None:
    # plain H2O would not keep it: see below
    llm = tiny_llama(path, n_ctx=400, hh=80, recent=20, slack=20)
    conversation = Conversation(llm, system=system)
    opening = conversation._template.opening
    for _ in range(20):
        said(conversation.say("what do you think of it?", max_tokens=SHORT))
    assert llm.kv.pinned == len(opening) > 5
    assert in_cache(llm)[: len(opening)] == opening
    assert held_by_all(llm) >= set(range(len(opening)))
    conversation.undo()
    conversation.clear()
    for _ in range(20):
        said(conversation.say("and now?", max_tokens=SHORT))
    assert held_by_all(llm) >= set(range(len(opening)))

    plain = tiny_llama(path, n_ctx=400, hh=80, recent=20, slack=20)
    plain.eval(in_cache(llm))
    assert not held_by_all(plain) >= set(range(len(opening)))


def test_pinned_rows_of_the_settings_stay(path: Path) -> None:
    llm = tiny_llama(path, n_ctx=400, hh=80, recent=20, pinned=70, slack=20)
    conversation = Conversation(llm)
    assert len(conversation._template.opening) < 70 == llm.kv.pinned
    said(conversation.say("hello", max_tokens=SHORT))
    assert llm.kv.pinned == 70


def test_a_system_prompt_that_does_not_fit_is_refused(path: Path) -> None:
    llm = tiny_llama(path, n_ctx=400, hh=20, recent=60)
    first = Conversation(llm)
    said(first.say("hello", max_tokens=SHORT))
    # the template's own prompt is only pinned where it fits
    assert llm.kv.pinned == 0
    before = in_cache(llm)
    for make in (lambda: Conversation(llm, system=SYSTEM), lambda: first.set_system(SYSTEM)):
        with pytest.raises(SettingsError, match=r"20 rows .* raise hh") as error:
            make()
        assert "\n" not in str(error.value)
    # and what was there is still there
    assert in_cache(llm) == before
    said(first.say("bye", max_tokens=SHORT))
    assert first.system is None


def test_another_system_prompt_is_read_with_all_turns(
    llm: Llama, drawn: list[list[int]], evaluated: list[int]
) -> None:
    conversation = Conversation(llm)
    said(conversation.say("one", max_tokens=SHORT))
    said(conversation.say("two", max_tokens=SHORT))
    conversation.set_system(SYSTEM)
    assert conversation.system == SYSTEM
    check_positions(conversation)
    parts = ChatTurns(llm.text.model, SYSTEM)
    expected = parts.first_turn("one") + drawn[0] + parts.next_turn("two") + drawn[1]
    assert text_of(conversation) == expected
    evaluated.clear()
    said(conversation.say("three", max_tokens=1))
    assert sum(evaluated) == len(expected) + len(parts.next_turn("three"))
    assert in_cache(llm) == expected + parts.next_turn("three")
    assert llm.kv.pinned == len(parts.opening)
    # back to the template's own, with nothing said
    conversation.clear()
    conversation.set_system(None)
    said(conversation.say("four", max_tokens=1))
    assert in_cache(llm) == ChatTurns(llm.text.model, None).first_turn("four")


def test_the_system_prompt_can_be_left_unpinned(path: Path) -> None:
    llm = tiny_llama(path, **EVICTING, policy="streaming:sinks=0")
    conversation = Conversation(llm, system=SYSTEM, pin_system=False)
    for _ in range(8):
        "".join(conversation.say("Where are we?", max_tokens=SHORT))
    assert llm.kv.pinned == 0
    assert llm.kv.compactions > 0
    assert int(llm.kv_rows(0)[0].min()) > len(conversation._template.opening)


@pytest.mark.parametrize("fair_turns", [False, True])
def test_fair_turns_keep_a_part_of_each_turn(path: Path, tmp_path: Path, fair_turns: bool) -> None:
    """Nothing else of a window would be left of the first turns. A session goes on as it was."""
    llm = tiny_llama(path, **EVICTING, policy="streaming:sinks=0")
    conversation = Conversation(llm, system=SYSTEM, fair_turns=fair_turns)
    for number in range(16):
        "".join(conversation.say(f"Where are we? This is question {number}.", max_tokens=SHORT))
        if number == 7:
            conversation.save(tmp_path / "chat.h2o")
            conversation = Conversation.load(tmp_path / "chat.h2o", llm)
    assert llm.kv.compactions > 2
    kept = [set(head) for layer in range(2) for head in llm.kv_rows(layer)[0].tolist()]
    has_rows = [
        all(head & set(range(turn.start, turn.end)) for head in kept) for turn in conversation.turns
    ]
    assert all(has_rows) == fair_turns
    assert has_rows[-1]
