"""Files: going on from one is going on, whatever was done before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conversations import (
    EVICTING,
    FULL,
    SHORT,
    SYSTEM,
    Trap,
    in_cache,
    next_logits,
    said,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError, SessionError
from pyh2o.writing.sampling import Sampling
from rewritten_sessions import change_header
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

DENSE = {"n_ctx": 250, "hh": 60, "recent": 60, "slack": 40, "positions": "dense"}


def rows_of(llm: Llama) -> list[npt.NDArray[Any]]:
    if not llm.evicting:
        return []
    return [array for layer in range(2) for array in llm.kv_rows(layer)]


@pytest.mark.parametrize(
    "settings", [EVICTING, FULL, DENSE, {**EVICTING, "type_k": 8, "type_v": 8}]
)
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
        assert loaded.tokens_evaluated < first.n_tokens or n_turns == 0
    if first.evicting:
        assert first.kv.compactions > 5


def prepare_nothing(_conversation: Conversation) -> None:
    pass


def prepare_interrupted(conversation: Conversation) -> None:
    said(conversation.say("one", max_tokens=SHORT))
    answer = conversation.say("two", max_tokens=40)
    next(answer)
    answer.close()


def prepare_left(conversation: Conversation) -> None:
    conversation.left = conversation.say("one", max_tokens=40)  # type: ignore[attr-defined]
    next(conversation.left)  # type: ignore[attr-defined]


def prepare_undone(conversation: Conversation) -> None:
    said(conversation.say("one", max_tokens=SHORT))
    said(conversation.say("two", max_tokens=SHORT))
    conversation.undo()


def prepare_undone_after_eviction(conversation: Conversation) -> None:
    said(conversation.say("one", max_tokens=SHORT))
    said(conversation.say("two", max_tokens=200))
    conversation.undo()


def prepare_cleared(conversation: Conversation) -> None:
    said(conversation.say("one", max_tokens=SHORT))
    conversation.clear()


def prepare_other_system(conversation: Conversation) -> None:
    said(conversation.say("one", max_tokens=SHORT))
    conversation.set_system(SYSTEM)


def prepare_failed(conversation: Conversation) -> None:
    said(conversation.say("one", max_tokens=SHORT))

    def fail(*_progress: int) -> None:
        raise KeyboardInterrupt

    conversation.llm.prompt_progress = fail
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * 100, max_tokens=SHORT))
    conversation.llm.prompt_progress = None


@pytest.mark.parametrize(
    "prepare",
    [
        prepare_nothing,
        prepare_interrupted,
        prepare_left,
        prepare_undone,
        prepare_undone_after_eviction,
        prepare_cleared,
        prepare_other_system,
        prepare_failed,
    ],
)
def test_a_file_can_be_written_at_any_time(
    path: Path, tmp_path: Path, prepare: Callable[[Conversation], None]
) -> None:
    told: tuple[list[int], list[int]] = ([], [])
    going = Conversation(tiny_llama(path, **EVICTING), on_recompute=told[0].append)
    prepare(going)
    told[0].clear()
    going.save(tmp_path / "chat")
    loaded = Conversation.load(
        tmp_path / "chat", tiny_llama(path, **EVICTING), on_recompute=told[1].append
    )
    assert text_of(loaded) == text_of(going)
    for each in (going, loaded):
        said(each.say("next", max_tokens=SHORT))
    assert loaded.turns == going.turns
    assert told[0] == told[1]
    np.testing.assert_equal(next_logits(loaded.llm), next_logits(going.llm))
    np.testing.assert_equal(rows_of(loaded.llm), rows_of(going.llm))


def test_ctrl_c_leaves_nothing_in_the_cache_that_spoils_a_file(
    path: Path, tmp_path: Path, trap: Trap
) -> None:
    going = Conversation(tiny_llama(path, **EVICTING))
    trap.countdown, trap.after = 4, True
    with pytest.raises(KeyboardInterrupt):
        said(going.say("one", max_tokens=SHORT))
    going.save(tmp_path / "chat")
    loaded = Conversation.load(tmp_path / "chat", tiny_llama(path, **EVICTING))
    for each in (going, loaded):
        said(each.say("next", max_tokens=SHORT))
    np.testing.assert_equal(next_logits(loaded.llm), next_logits(going.llm))


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
    check_refused(file, tiny_llama(other, **EVICTING), "another than")
    llm = tiny_llama(path, **EVICTING, chat_format="zephyr")
    check_refused(file, llm, "another chat template")


def test_a_damaged_file_is_refused(path: Path, file: Path, rng: np.random.Generator) -> None:
    llm = tiny_llama(path, **EVICTING)
    data = file.read_bytes()
    turns = Conversation.load(file, llm).turns
    for _ in range(60):
        damaged = bytearray(data)
        place = int(rng.integers(len(data)))
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            assert Conversation.load(file, llm).turns == turns
        except SessionError:
            continue
    for size in rng.integers(0, len(data), 20):
        file.write_bytes(data[:size])
        check_refused(file, llm, "damaged|not a session")


EDITS: list[Callable[[dict[str, Any]], Any]] = [
    lambda h: h.pop("system"),
    lambda h: h.update(system=5),
    lambda h: h.pop("turns"),
    lambda h: h.update(turns=None),
    lambda h: h.update(turns=[1]),
    lambda h: h.update(turns=[{}]),
    lambda h: h["turns"].pop(),
    lambda h: h["turns"].reverse(),
    lambda h: h["turns"][0].pop("user"),
    lambda h: h["turns"][0].update(user=None),
    lambda h: h["turns"][0].update(more=1),
    lambda h: h["turns"][0].update(finish="why not"),
    lambda h: h["turns"][0].update(start=-1),
    lambda h: h["turns"][0].update(start="0"),
    lambda h: h["turns"][0].update(start=True),
    lambda h: h["turns"][0].update(start=1.5),
    lambda h: h["turns"][0].update(attempt=-1),
    lambda h: h["turns"][1].update(start=h["turns"][0]["start"]),
    lambda h: h["turns"][0].update(answer_start=h["turns"][0]["start"]),
    lambda h: h["turns"][0].update(end=h["turns"][0]["answer_start"]),
    lambda h: h["turns"][1].update(end=10**9),
    lambda h: h.pop("sampling"),
    lambda h: h.update(sampling=[]),
    lambda h: h["sampling"].update(temperature=-1),
    lambda h: h["sampling"].update(temperature="hot"),
    lambda h: h["sampling"].update(unknown=1),
    lambda h: h.pop("cached"),
    lambda h: h.update(cached=-1),
    lambda h: h.update(cached=10**9),
    lambda h: h.update(cached="1"),
    lambda h: h.update(cached=True),
    lambda h: h.update(known=2),
    lambda h: h.update(known=None),
    lambda h: h.update(template="x"),
    lambda h: h.pop("template"),
]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_header_is_refused(
    path: Path, file: Path, edit: Callable[[dict[str, Any]], Any]
) -> None:
    change_header(file, edit)
    with pytest.raises(SessionError) as error:
        Conversation.load(file, tiny_llama(path, **EVICTING))
    assert "\n" not in str(error.value)


def test_a_full_disk_leaves_the_old_file_and_the_conversation(
    llm: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(llm)
    said(conversation.say("one", max_tokens=SHORT))
    conversation.save(tmp_path / "chat")
    before = (tmp_path / "chat").read_bytes()
    said(conversation.say("two", max_tokens=SHORT))

    def full(*_args: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SessionError, match="No space left"):
            conversation.save(tmp_path / "chat")
    assert (tmp_path / "chat").read_bytes() == before
    said(conversation.say("three", max_tokens=SHORT))
    conversation.save(tmp_path / "chat")
    assert len(Conversation.load(tmp_path / "chat", llm).turns) == 3


def test_text_that_is_no_unicode_can_be_kept(llm: Llama, tmp_path: Path) -> None:
    conversation = Conversation(llm)
    for change in (
        lambda: said(conversation.say("\udcff")),
        lambda: Conversation(llm, system="\ud800"),
    ):
        with pytest.raises(PyH2OError, match="not Unicode"):
            change()
    said(conversation.say("日本 🙂 \0", max_tokens=SHORT))
    conversation.save(tmp_path / "chat")
    assert Conversation.load(tmp_path / "chat", llm).turns == conversation.turns


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


def test_a_model_file_may_be_removed_while_it_is_open(tmp_path: Path) -> None:
    name = write_chat_gguf(tmp_path / "model.gguf", CHATML)
    llm = tiny_llama(name, **EVICTING)
    name.unlink()
    conversation = Conversation(llm)
    said(conversation.say("Hello", max_tokens=SHORT))
    conversation.save(tmp_path / "talk.h2o")
    assert (tmp_path / "talk.h2o").exists()
