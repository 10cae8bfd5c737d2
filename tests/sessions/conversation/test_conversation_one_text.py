"""One model has one text: who it belongs to, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conversations import EVICTING, SHORT, said, text_of
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError
from tiny_llama import tiny_llama


def changes(conversation: Conversation, folder: Path) -> list[Callable[[], Any]]:
    return [
        lambda: said(conversation.say("x", max_tokens=2)),
        lambda: said(conversation.regenerate(max_tokens=2)),
        lambda: said(conversation.edit("x", max_tokens=2)),
        lambda: conversation.save(folder / "x"),
        lambda: conversation.set_system("x"),
        conversation.undo,
        conversation.clear,
    ]


def test_a_conversation_ends_when_another_begins(llm: Llama, tmp_path: Path) -> None:
    first = Conversation(llm)
    left = first.say("hello", max_tokens=40)
    next(left)
    second = Conversation(llm)
    said(second.say("hello", max_tokens=SHORT))
    for change in changes(first, tmp_path):
        with pytest.raises(PyH2OError, match="another text") as error:
            change()
        assert "\n" not in str(error.value)
    text = text_of(second)
    assert list(left) == []
    assert text_of(second) == text
    assert len(first.turns) == 1
    said(second.say("bye", max_tokens=SHORT))


def test_a_text_of_somebody_else_is_noticed(path: Path, tmp_path: Path) -> None:
    uses: list[Callable[[Llama], Any]] = [
        lambda llm: llm.reset(),
        lambda llm: llm.eval([5]),
        lambda llm: llm.create_completion("hello", max_tokens=3),
        lambda llm: llm.create_completion([5] * llm.n_tokens, max_tokens=1),
    ]
    for use in uses:
        llm = tiny_llama(path, **EVICTING)
        conversation = Conversation(llm)
        said(conversation.say("hello", max_tokens=SHORT))
        use(llm)
        for change in changes(conversation, tmp_path):
            with pytest.raises(PyH2OError, match="another text"):
                change()
        assert [turn.user for turn in conversation.turns] == ["hello"]
        Conversation(llm)


def test_using_the_model_within_an_answer_is_noticed(llm: Llama) -> None:
    conversation = Conversation(llm)
    answer = conversation.say("hello", max_tokens=40)
    next(answer)
    llm.create_completion("something else", max_tokens=3)
    with pytest.raises(PyH2OError, match="another text"):
        said(answer)
    with pytest.raises(PyH2OError, match="another text"):
        said(conversation.say("x", max_tokens=2))


def test_an_answer_cannot_begin_within_one(path: Path) -> None:
    errors: list[PyH2OError] = []

    def again(*_: int) -> None:
        for change in (lambda: said(conversation.say("x")), conversation.undo):
            with pytest.raises(PyH2OError, match="being generated") as error:
                change()
            errors.append(error.value)

    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm)
    llm.text.prompt_progress = again
    said(conversation.say("hello", max_tokens=SHORT))
    assert errors
    assert len(conversation.turns) == 1
