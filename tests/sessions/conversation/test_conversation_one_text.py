"""One model has one text at a time, which conversations share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conversations import EVICTING, SHORT, in_cache, said, text_of
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError
from tiny_llama import tiny_llama


def test_two_conversations_take_turns_in_one_model(
    path: Path, llm: Llama, evaluated: list[int]
) -> None:
    """Snapshots restore them, so nothing is read twice."""
    shared = [Conversation(llm), Conversation(llm, system="Be brief.")]
    for n in range(4):
        for conversation in shared:
            said(conversation.say(f"message {n}", max_tokens=40))
    assert llm.kv.compactions > 0
    assert sum(evaluated) < sum(len(each.tokens) for each in shared) + len(shared)
    alone = [
        Conversation(tiny_llama(path, **EVICTING)),
        Conversation(tiny_llama(path, **EVICTING), system="Be brief."),
    ]
    for conversation, expected in zip(shared, alone, strict=True):
        for n in range(4):
            said(expected.say(f"message {n}", max_tokens=40))
        assert text_of(conversation) == text_of(expected)


def test_an_answer_ends_when_another_conversation_starts(llm: Llama) -> None:
    first = Conversation(llm)
    left = first.say("hello", max_tokens=40)
    next(left)
    second = Conversation(llm)
    said(second.say("hello", max_tokens=SHORT))
    text = text_of(second)
    assert list(left) == []
    assert text_of(second) == text
    assert [turn.finish for turn in first.turns] == ["interrupted"]
    said(second.say("bye", max_tokens=SHORT))


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.reset(),
        lambda llm: llm.eval([5]),
        lambda llm: llm.create_completion("hello", max_tokens=3),
        lambda llm: llm.create_completion([5] * llm.n_tokens, max_tokens=1),
    ],
)
def test_a_conversation_is_read_again_after_another_use(
    path: Path, tmp_path: Path, use: Callable[[Llama], Any]
) -> None:
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm)
    said(conversation.say("hello", max_tokens=SHORT))
    before = text_of(conversation)
    use(llm)
    n_tokens = llm.n_tokens
    conversation.save(tmp_path / "x")
    assert llm.n_tokens == n_tokens
    for answer in (conversation.say, conversation.edit):
        said(answer("x", max_tokens=2))
        assert text_of(conversation)[: len(before)] == before
        assert in_cache(llm) == text_of(conversation)[:-1]
        use(llm)
    conversation.undo()
    assert text_of(conversation) == before


def test_using_the_model_within_an_answer_is_noticed(llm: Llama) -> None:
    conversation = Conversation(llm)
    answer = conversation.say("hello", max_tokens=40)
    next(answer)
    llm.create_completion("something else", max_tokens=3)
    with pytest.raises(PyH2OError, match="another text"):
        said(answer)
    said(conversation.say("x", max_tokens=2))
    assert [turn.user for turn in conversation.turns] == ["x"]


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
