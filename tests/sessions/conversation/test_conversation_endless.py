"""Answers that only repeat themselves: they end, and go on if somebody likes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversations import EVICTING, said, text_of
from cycling import CYCLE, let_answers_cycle
from pyh2o import Conversation, Llama
from pyh2o.writing.repetition import ENDLESS_MATCHES
from tiny_llama import tiny_llama

MOST = 1000


@pytest.fixture
def endless(llm: Llama, drawn: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Conversation:
    """A conversation with such an answer."""
    let_answers_cycle(monkeypatch)
    conversation = Conversation(llm)
    text = said(conversation.say("hello", max_tokens=MOST))
    assert text == conversation.turns[0].answer
    return conversation


def test_the_answer_ends(endless: Conversation) -> None:
    [turn] = endless.turns
    assert turn.finish == "repetition"
    answer = text_of(endless)[turn.answer_start : turn.end]
    assert set(answer) == set(CYCLE)
    assert len(answer) == len(CYCLE) + ENDLESS_MATCHES


def test_it_goes_on_for_a_while(endless: Conversation, tmp_path: Path) -> None:
    before, tokens = endless.turns[0], text_of(endless)
    endless.save(tmp_path / "endless.h2o")
    loaded = Conversation.load(tmp_path / "endless.h2o", endless.llm)
    assert loaded.turns == (before,)
    said(loaded.go_on(max_tokens=MOST))
    assert loaded.turns[0].finish == "repetition"
    assert loaded.turns[0].end == before.end + ENDLESS_MATCHES
    assert text_of(loaded)[: len(tokens)] == tokens
    said(loaded.say("and now?", max_tokens=5))
    assert [turn.finish for turn in loaded.turns] == ["repetition", "length"]


def test_it_ends_at_the_same_token_if_it_was_stopped_before(
    endless: Conversation, path: Path
) -> None:
    other = Conversation(tiny_llama(path, **EVICTING))
    said(other.say("hello", max_tokens=ENDLESS_MATCHES - 90))
    assert other.turns[0].finish == "length"
    said(other.go_on(max_tokens=MOST))
    assert text_of(other) == text_of(endless)
    assert other.turns == endless.turns


def test_the_next_answer_begins_anew(endless: Conversation) -> None:
    said(endless.say("once more", max_tokens=ENDLESS_MATCHES))
    said(endless.regenerate(max_tokens=ENDLESS_MATCHES))
    assert [turn.finish for turn in endless.turns] == ["repetition", "length"]
