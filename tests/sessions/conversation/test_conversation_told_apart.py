"""Thoughts are told apart from answers, whatever opens them; the text keeps the tokens."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from conversations import check_positions, n_evaluated, said, text_of
from forced_text import force
from pyh2o import Conversation
from pyh2o.sessions.turns import Turn
from pyh2o.writing.pieces import ReasoningText
from tiny_chat import CHATML, OPENS_THOUGHTS, THINKING, write_chat_gguf
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama
from tiny_tokens import BYTE_0

ROOMY = {"n_ctx": 2000, "hh": 1000, "recent": 1000}
THOUGHTS, ANSWER = "Well,\nlet me see.", "It is < 3."


@pytest.fixture
def texts(drawn: Any, monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    """What the model will write."""
    return force(monkeypatch)


def check_told_apart(turn: Turn) -> None:
    assert turn.reasoning.strip() == THOUGHTS
    assert turn.answer == ANSWER


@pytest.mark.parametrize(("template", "opens"), [(THINKING, "<think>\n"), (OPENS_THOUGHTS, "")])
def test_thoughts_are_told_apart(
    tmp_path: Path, texts: deque[Any], template: str, opens: str
) -> None:
    conversation = Conversation(tiny_llama(write_chat_gguf(tmp_path / "m", template), **ROOMY))
    texts.extend([f"{opens}{THOUGHTS}\n</think>\n\n{ANSWER}"] * 2)
    for number in range(2):
        pieces = list(conversation.say("why?"))
        assert (
            "".join(each for each in pieces if isinstance(each, ReasoningText)).strip() == THOUGHTS
        )
        assert "".join(each for each in pieces if not isinstance(each, ReasoningText)) == ANSWER
        assert len(pieces) > 20  # as they come
        check_told_apart(conversation.turns[number])
    assert n_evaluated(conversation) == len(text_of(conversation))
    check_positions(conversation)
    conversation.save(tmp_path / "chat")
    assert Conversation.load(tmp_path / "chat", conversation.llm).turns[1].reasoning.strip() == (
        THOUGHTS
    )


def test_control_tokens_may_be_the_marks(tmp_path: Path, texts: deque[Any]) -> None:
    marks = dict.fromkeys(("<|im_start|>", "<|im_end|>", "<think>", "</think>"), TokenType.CONTROL)
    path = write_tiny_gguf(tmp_path / "m", seed=4, chat_template=THINKING, marks=marks)
    conversation = Conversation(tiny_llama(path, **ROOMY))
    model = conversation.llm.model
    opens, closes = (
        model.tokenize(mark.encode(), add_bos=False, special=True)
        for mark in ("<think>", "</think>")
    )
    assert len(opens) == len(closes) == 1
    thoughts, answer = ([BYTE_0 + byte for byte in t.encode()] for t in (THOUGHTS, ANSWER))
    texts.append([*opens, *thoughts, *closes, *answer])
    assert ANSWER in said(conversation.say("why?"))
    check_told_apart(conversation.turns[0])


@pytest.mark.parametrize("cut", [5, len(THOUGHTS) + 20])
def test_answer_goes_on_where_it_was_cut(tmp_path: Path, texts: deque[Any], cut: int) -> None:
    path = write_chat_gguf(tmp_path / "m", OPENS_THOUGHTS)
    conversation = Conversation(tiny_llama(path, **ROOMY))
    whole = f"{THOUGHTS}\n</think>\n\n{ANSWER}"
    texts.extend([whole[:cut], whole[cut:]])
    first = list(conversation.say("why?", max_tokens=cut))
    rest = list(conversation.resume())
    check_told_apart(conversation.turns[0])
    shown = "".join(each for each in first + rest if not isinstance(each, ReasoningText))
    assert shown == ANSWER
    check_positions(conversation)


def test_template_without_thoughts_has_none(tmp_path: Path, texts: deque[Any]) -> None:
    conversation = Conversation(tiny_llama(write_chat_gguf(tmp_path / "m", CHATML), **ROOMY))
    texts.append(f"<think>{THOUGHTS}</think>{ANSWER}")
    said(conversation.say("why?"))
    assert conversation.turns[0].answer == f"<think>{THOUGHTS}</think>{ANSWER}"
    assert conversation.turns[0].reasoning == ""
