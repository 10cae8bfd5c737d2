"""Conversations and stories whose tokens find evicted rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conversations import SYSTEM, check_positions, in_cache, refuse, said, text_of
from pyh2o import Conversation, Llama
from pyh2o.writing.sampling import Sampling
from stories import Result, cuts, in_pieces, whole
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


def talk(llm: Llama, **settings: Any) -> Conversation:
    """A long message, which is evicted for the most part, and a question."""
    chat = Conversation(llm, sampling=GREEDY, on_recompute=refuse, **settings)
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
    chat._on_recompute = None
    said(chat.edit(QUESTIONS[1], max_tokens=SHORT))
    assert llm.recalled() not in ([], spans)
    check_positions(chat)


@pytest.mark.parametrize("settings", [{"system": SYSTEM}, {"fair_turns": True}], ids=str)
def test_with_a_system_prompt_and_fair_turns(llm: Llama, settings: dict[str, Any]) -> None:
    chat = talk(llm, **settings)
    assert llm.kv.found_share > 0
    chat.set_system(None if "system" in settings else SYSTEM)
    chat._on_recompute = None
    said(chat.say(QUESTIONS[1], max_tokens=SHORT))
    assert llm.kv.found_share > 0
    assert llm.kv.archived < llm.n_tokens
    check_positions(chat)


def test_clearing_empties_the_archive(llm: Llama) -> None:
    chat = talk(llm)
    chat._on_recompute = None
    chat.clear()
    said(chat.say("hello", max_tokens=1))
    assert (llm.kv.archived, llm.kv.found_share, llm.recalled()) == (0, 0, [])


def test_a_loaded_conversation_goes_on_as_the_saved_one(
    path: Path, llm: Llama, tmp_path: Path
) -> None:
    chat = talk(llm)
    file = tmp_path / "chat.h2o"
    chat.save(file)
    with tiny_llama(path, **CACHE) as other:
        loaded = Conversation.load(file, other, on_recompute=refuse)
        assert other.recalled() == []  # that is not saved
        for question in QUESTIONS:
            mine = said(chat.say(question, max_tokens=SHORT))
            assert said(loaded.say(question, max_tokens=SHORT)) == mine
            assert other.recalled() == llm.recalled() != []


@pytest.mark.parametrize("policy", ["h2o-far:near=8", "snap:queries=8"])
def test_a_story_in_pieces_is_the_story_in_one_go(
    path: Path, tmp_path: Path, rng: np.random.Generator, policy: str
) -> None:
    """Token for token, with rows that are found, over compactions and re-bases."""
    llms = [tiny_llama(path, policy=policy, **CACHE) for _ in range(2)]
    total = 700
    story = {"sampling": Sampling(temperature=1.0, seed=7), "ignore_eos": True}
    expected: Result = whole(llms[0], total, **story)
    assert llms[0].kv.found_share > 0
    assert llms[0].kv.rebases > 0
    llms[0].reset()
    mine = in_pieces(llms, tmp_path / "story.h2o", cuts(rng, total), **story)
    assert mine == expected
    for llm in llms:
        llm.close()
