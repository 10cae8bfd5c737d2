"""Conversations whose tokens find evicted rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conversations import check_positions, in_cache, said, text_of
from pyh2o import Conversation, Llama
from pyh2o.writing.sampling import Sampling
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import tiny_llama

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 92, "recent": 60, "slack": 40, "recall": 32}
GREEDY = Sampling(temperature=0.0)
SHORT = 9
QUESTIONS = ["What was the first word that I said to you, and why?", "And the colour of the hay?"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_gguf(
        folder / "tiny.gguf", seed=4, n_layer=2, n_ctx_train=600, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture
def llm(path: Path) -> Iterator[Llama]:
    llm = tiny_llama(path, **CACHE)
    yield llm
    llm.close()


def talk(llm: Llama) -> Conversation:
    """A long message, which is evicted for the most part, and a question."""
    chat = Conversation(llm, sampling=GREEDY)
    said(chat.say("hay " * 60 + "needle " + "straw " * 20, max_tokens=SHORT))
    said(chat.say(QUESTIONS[0], max_tokens=SHORT))
    return chat


def test_each_answer_has_looked_at_its_own(llm: Llama) -> None:
    chat = talk(llm)
    first, n_looked = llm.recalled(), llm.kv.n_looked
    assert first
    turn = chat.turns[-1]
    assert n_looked <= turn.end - turn.start + 2  # with the end of the answer before
    assert llm.kv.found_share > 0
    said(chat.say(QUESTIONS[1], max_tokens=SHORT))
    assert llm.recalled() != first
    assert in_cache(llm) == text_of(chat)[: llm.n_tokens]
    check_positions(chat)


def test_another_answer_looks_anew(llm: Llama) -> None:
    chat = talk(llm)
    n_looked = llm.kv.n_looked
    said(chat.regenerate(max_tokens=SHORT))
    assert 0 < llm.kv.n_looked <= n_looked
    assert llm.recalled() != []
    check_positions(chat)


def test_an_edited_message_finds_what_it_wants(llm: Llama) -> None:
    chat = talk(llm)
    spans = llm.recalled()
    said(chat.edit(QUESTIONS[1], max_tokens=SHORT))
    assert llm.recalled() not in ([], spans)
    check_positions(chat)


def test_clearing_empties_the_archive(llm: Llama) -> None:
    chat = talk(llm)
    chat.clear()
    said(chat.say("hello", max_tokens=1))
    assert (llm.kv.archived, llm.kv.found_share, llm.recalled()) == (0, 0, [])
