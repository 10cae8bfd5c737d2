"""Answers that come to the end of all positions, or only repeat themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat_turns import ChatTurns
from conversations import EVICTING, SHORT, check_positions, said, text_of
from cycling import CYCLE, let_answers_cycle
from pyh2o import Conversation, Llama
from pyh2o.errors import ContextLimitError
from pyh2o.writing.repetition import ENDLESS_MATCHES
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

MOST = 1000


@pytest.mark.parametrize(
    ("variant", "settings", "finish", "cure"),
    [
        ("llama", {"n_ctx": 256, "evict": False}, "length", "turn eviction on"),
        ("learned_positions", {"hh": 60, "recent": 60}, "trained_context", "start a new one"),
    ],
)
def test_the_end_of_all_positions(
    tmp_path: Path, variant: str, settings: dict[str, Any], finish: str, cure: str
) -> None:
    path = write_chat_gguf(
        tmp_path / "tiny.gguf", CHATML, arch_variant=variant, n_ctx_train=256, n_layer=1
    )
    # long enough to reach the limit, with no end
    greedy = Sampling(temperature=0.0, repeat_penalty=1.0)
    llm = tiny_llama(path, **settings)
    conversation = Conversation(llm, sampling=greedy)
    said(conversation.say("hello", max_tokens=100))
    with pytest.raises(ContextLimitError, match=cure) as error:
        said(conversation.say("x" * 500))
    assert "\n" not in str(error.value)
    assert len(conversation.turns) == 1
    said(conversation.say("go on"))
    assert conversation.turns[-1].finish == finish
    assert conversation.turns[-1].end == 256 + (finish == "trained_context")
    with pytest.raises(ContextLimitError, match=cure):
        said(conversation.say("and now?"))
    said(conversation.edit("less", max_tokens=SHORT))
    assert [turn.user for turn in conversation.turns] == ["hello", "less"]
    check_positions(conversation)


def test_the_last_position_can_be_used(path: Path) -> None:
    llm = tiny_llama(path, n_ctx=256, evict=False)
    opening = len(ChatTurns(llm.text.model, None).first_turn(""))
    for room in (2, 1, 0):
        conversation = Conversation(llm)
        answer = conversation.say("\u0001" * (256 - opening - room))
        if room == 0:
            with pytest.raises(ContextLimitError, match="exceed context window of 256"):
                said(answer)
        else:
            said(answer)
            (turn,) = conversation.turns
            assert turn.end - turn.answer_start == room


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
