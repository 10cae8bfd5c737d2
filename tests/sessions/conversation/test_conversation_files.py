"""Files: going on from one is going on, whatever was done before."""

from __future__ import annotations

import os
import re
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
from pyh2o.sessions.story import Story
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


def test_a_file_that_does_not_fit_is_read_again(path: Path, tmp_path: Path, file: Path) -> None:
    other = write_chat_gguf(tmp_path / "tiny.gguf", CHATML, n_layer=2, seed=9)
    for llm, reason in (
        (tiny_llama(path, **{**EVICTING, "hh": 61}), "with --hh 60, and the model is loaded with"),
        (tiny_llama(other, **EVICTING), r"another model \(tiny.gguf\)"),
        (tiny_llama(path, **EVICTING, chat_format="zephyr"), "another chat template"),
    ):
        talk = Conversation.load(file, llm)
        assert re.search(reason, talk.reread_reason)
        assert [turn.user for turn in talk.turns] == ["one", "two"]
        assert talk.unread == text_of(talk)
        said(talk.say("three", max_tokens=SHORT))


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "changed"])
def test_a_damaged_kv_file_is_read_again(path: Path, file: Path, damage: str) -> None:
    kv = file.with_name("chat.kv")
    data = kv.read_bytes()
    kv.unlink()
    if damage != "missing":
        at = len(data) // 2
        changed = {"empty": b"", "cut": data[:-1], "changed": data[:at] + b"!!!" + data[at + 3 :]}
        kv.write_bytes(changed[damage])
    talk = Conversation.load(file, tiny_llama(path, **EVICTING))
    assert talk.reread_reason.startswith("its KV cache")
    tokens = text_of(talk)
    assert talk.unread == tokens
    said(talk.say("three", max_tokens=SHORT))
    assert in_cache(talk.llm)[: len(tokens)] == tokens
    talk.save(file)
    again = Conversation.load(file, tiny_llama(path, **EVICTING))
    assert (len(again.unread), again.reread_reason) == (1, "")


def test_an_older_kv_file_keeps_what_the_text_still_has(path: Path, file: Path) -> None:
    llm = tiny_llama(path, **EVICTING)
    talk = Conversation.load(file, llm)
    kv = file.with_name("chat.kv").read_bytes()
    said(talk.say("three", max_tokens=SHORT))
    for turns in (talk.turns, talk.turns[:1]):
        while len(talk.turns) > len(turns):
            talk.undo()
        talk.save(file)
        file.with_name("chat.kv").write_bytes(kv)
        loaded = Conversation.load(file, tiny_llama(path, **EVICTING))
        assert (loaded.turns, loaded.reread_reason) == (turns, "")
        assert loaded.llm.n_tokens > loaded.turns[0].answer_start
        said(loaded.say("four", max_tokens=SHORT))


def test_files_of_another_kind_are_refused(path: Path, tmp_path: Path, file: Path) -> None:
    llm = tiny_llama(path, **EVICTING)
    talk = Conversation(llm)
    said(talk.say("hello", max_tokens=SHORT))
    before = file.read_bytes()
    for name, message in (("none", "there is no session file"), ("tiny.gguf", "is not a session")):
        with pytest.raises(SessionError, match=message):
            Conversation.load(path.parent / name, llm)
    with pytest.raises(SessionError, match="chat is a conversation"):
        Story.load(file, llm)
    with pytest.raises(SessionError, match="holds a conversation, not a story"):
        Story(tiny_llama(path, **EVICTING), "Once").save(file)
    assert file.read_bytes() == before
    said(talk.say("bye", max_tokens=SHORT))


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
    other = Conversation.load(tmp_path / "talk.h2o", tiny_llama(name, **EVICTING))
    assert "another model" in other.reread_reason
    other = Conversation.load(tmp_path / "talk.h2o", tiny_llama(kept, **EVICTING))
    assert (other.turns, other.reread_reason) == (conversation.turns, "")
