"""Files: going on from one is going on, whatever was done before."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp.llama_chat_format import (
    ChatFormatterResponse,
    Jinja2ChatFormatter,
    chat_formatter_to_chat_completion_handler,
)

from chat_turns import ChatTurns
from conversations import (
    EVICTING,
    FULL,
    SHORT,
    SYSTEM,
    in_cache,
    n_evaluated,
    next_logits,
    said,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.errors import SessionError
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama


def rows_of(llm: Llama) -> list[npt.NDArray[Any]]:
    if not llm.evicting:
        return []
    return [array for layer in range(2) for array in llm.kv_rows(layer)]


@pytest.mark.parametrize("settings", [EVICTING, FULL, {**EVICTING, "type_k": 8, "type_v": 8}])
def test_going_on_from_a_file_is_going_on(
    path: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Bit for bit: text, tokens, logits, kept rows and their scores."""
    sampling = Sampling(temperature=1.2, top_k=0, seed=5)
    first = tiny_llama(path, **settings)
    going = Conversation(first, system=SYSTEM, sampling=sampling)
    file = tmp_path / "chat"

    def go_on(conversation: Conversation) -> list[Any]:
        llm = conversation.llm
        seen: list[Any] = [said(conversation.say("and then?", max_tokens=30)), next_logits(llm)]
        seen += [said(conversation.regenerate(max_tokens=30)), next_logits(llm)]
        seen += [said(conversation.say("why?", max_tokens=100)), next_logits(llm)]
        return [*seen, conversation.turns, in_cache(llm), *rows_of(llm)]

    for n_turns in range(4):
        going.save(file)
        # a process of its own could not know more
        loaded = Conversation.load(file, tiny_llama(path, **settings))
        assert loaded.turns == going.turns
        assert len(loaded.turns) == 2 * n_turns
        assert (loaded.system, loaded.sampling) == (SYSTEM, sampling)
        for mine, other in zip(go_on(going), go_on(loaded), strict=True):
            np.testing.assert_equal(other, mine)
        assert n_evaluated(loaded) < first.n_tokens or n_turns == 0
    if first.evicting:
        assert first.kv.compactions > 5


@pytest.fixture
def file(path: Path, tmp_path: Path) -> Path:
    conversation = Conversation(tiny_llama(path, **EVICTING), system=SYSTEM)
    said(conversation.say("one", max_tokens=SHORT))
    said(conversation.say("two", max_tokens=SHORT))
    conversation.save(tmp_path / "chat")
    return tmp_path / "chat"


def check_refused(file: Path, llm: Llama, message: str) -> None:
    """A file is refused in one line, and leaves the conversation in the model as it is."""
    conversation = Conversation(llm)
    said(conversation.say("hello", max_tokens=SHORT))
    with pytest.raises(SessionError, match=message) as error:
        Conversation.load(file, llm)
    assert "\n" not in str(error.value)
    said(conversation.say("bye", max_tokens=SHORT))


def test_a_file_that_does_not_fit_is_refused(path: Path, tmp_path: Path, file: Path) -> None:
    check_refused(tmp_path / "none", tiny_llama(path, **EVICTING), "there is no session file")
    check_refused(file, tiny_llama(path, **{**EVICTING, "hh": 61}), "--hh 60")
    other = write_chat_gguf(tmp_path / "tiny.gguf", CHATML, n_layer=2, seed=9)
    check_refused(file, tiny_llama(other, **EVICTING), "was made with the model")
    llm = tiny_llama(path, **EVICTING, chat_format="zephyr")
    check_refused(file, llm, "another chat template")


def test_a_template_may_write_the_date(path: Path, tmp_path: Path) -> None:
    """A conversation goes on under the one it was begun with, and a new text has the new one."""

    def on(day: str) -> Llama:
        formatter = Jinja2ChatFormatter(CHATML, eos_token="", bos_token="<s>")

        def dated(**request: Any) -> ChatFormatterResponse:
            made = formatter(**request)
            return replace(made, prompt=made.prompt.replace(SYSTEM, f"{SYSTEM} It is {day}."))

        handler = chat_formatter_to_chat_completion_handler(dated)
        return tiny_llama(path, **EVICTING, chat_handler=handler)

    talk = Conversation(on("day 3"), system=SYSTEM)
    for message in ("one", "two"):
        said(talk.say(message, max_tokens=SHORT))
    talk.save(tmp_path / "talk")
    text = text_of(talk)
    talk = Conversation.load(tmp_path / "talk", on("the day 14"))
    said(talk.say("three", max_tokens=SHORT))
    assert text_of(talk)[: len(text)] == text
    for _ in range(2):
        talk.undo()
    said(talk.edit("new", max_tokens=SHORT))
    first = ChatTurns(talk.llm.model, SYSTEM).first_turn("new")
    assert text_of(talk)[: len(first)] == first


def test_a_model_file_may_be_replaced_while_it_is_open(tmp_path: Path) -> None:
    """The session is of the model that was loaded, whatever has its name when it is saved."""
    name, new = tmp_path / "model.gguf", tmp_path / "new.gguf"
    write_chat_gguf(name, CHATML, seed=3)
    write_chat_gguf(new, CHATML, seed=4)
    kept = tmp_path / "kept.gguf"
    os.link(name, kept)
    llm = tiny_llama(name, **EVICTING)
    new.replace(name)
    conversation = Conversation(llm)
    said(conversation.say("Hello", max_tokens=SHORT))
    conversation.save(tmp_path / "talk.h2o")
    with pytest.raises(SessionError, match="was made with"):
        Conversation.load(tmp_path / "talk.h2o", tiny_llama(name, **EVICTING))
    other = Conversation.load(tmp_path / "talk.h2o", tiny_llama(kept, **EVICTING))
    assert other.turns == conversation.turns
