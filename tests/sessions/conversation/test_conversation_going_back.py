"""Regenerate, undo and edit after compactions: from snapshots of the cache, and not by reading."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archived_talk import RECALLING
from conversations import (
    EVICTING,
    ROOMY,
    SHORT,
    check_positions,
    in_cache,
    n_evaluated,
    said,
    text_of,
)
from many_texts import at_once, llama_in, tiny_engine
from pyh2o import Conversation, Llama
from pyh2o.core.prefix_cache import StoreCounts
from pyh2o.core.prefixes import MIN_SAVED
from pyh2o.engine import Engine
from pyh2o.errors import SettingsError, StateError
from pyh2o.sessions import conversation as conversation_module
from pyh2o.sessions.turns import answer_seed
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama

LONG = 150  # tokens of an answer during which a compaction happens
MESSAGE = "a message that takes its time "


@pytest.fixture
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt draws with the seed of the first one."""
    monkeypatch.setattr(
        conversation_module, "answer_seed", lambda of, turn, *_: answer_seed(of, turn, 0, 0)
    )


def n_stored(conversation: Conversation) -> StoreCounts:
    return conversation.llm.model.snapshots.counts


def talk(llm: Llama, n_turns: int = 2, *, times: int = 4, **settings: Any) -> Conversation:
    conversation = Conversation(llm, **settings)
    for i in range(n_turns):
        said(conversation.say(MESSAGE * times + str(i), max_tokens=LONG))
    return conversation


@pytest.mark.usefixtures("same_seeds")
@pytest.mark.parametrize("settings", [EVICTING, RECALLING], ids=["evicting", "recalling"])
@pytest.mark.parametrize("times", [0, 4, 30], ids=["short", "long", "longer than the cache"])
def test_another_answer_with_the_same_seed_is_the_same(
    path: Path, evaluated: list[int], settings: dict[str, Any], times: int
) -> None:
    llm = tiny_llama(path, **settings)
    conversation = talk(llm, times=times)
    turn = conversation.turns[-1]
    rows = [llm.kv_rows(layer) for layer in range(2)]
    assert not llm.text.can_remove_tail(turn.answer_start)
    for _ in range(2):
        evaluated.clear()
        said(conversation.regenerate(max_tokens=LONG))
        assert conversation.turns[-1].answer == turn.answer
        for layer in range(2):
            np.testing.assert_array_equal(rows[layer], llm.kv_rows(layer))
        assert sum(evaluated) < LONG + 3 * MIN_SAVED  # with what was read of the message
        check_positions(conversation)


def test_going_back_reads_no_more_than_what_is_new(path: Path, evaluated: list[int]) -> None:
    conversation = talk(tiny_llama(path, **EVICTING), 4)
    for change in ("regenerate", "edit", "undo"):
        evaluated.clear()
        if change == "regenerate":
            said(conversation.regenerate(max_tokens=1))
            n_new = 1
        elif change == "edit":
            said(conversation.edit("another", max_tokens=LONG))
            turn = conversation.turns[-1]
            n_new = turn.answer_start - turn.start + LONG
        else:
            conversation.undo()
            conversation.undo()
            said(conversation.say("another", max_tokens=1))
            turn = conversation.turns[-1]
            n_new = turn.answer_start - turn.start
        assert sum(evaluated) <= n_new + MIN_SAVED
        check_positions(conversation)
    assert in_cache(conversation.llm) == text_of(conversation)[: conversation.llm.n_tokens]


def test_a_reading_that_is_stopped_leaves_no_trace(path: Path, evaluated: list[int]) -> None:
    llm = tiny_llama(path, **EVICTING, n_batch=16)
    conversation = talk(llm)
    before, state = (conversation.turns, text_of(conversation)), llm.kv_state()

    def on_progress(done: int, _total: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    llm.text.prompt_progress = on_progress
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * 100, max_tokens=SHORT))
    llm.text.prompt_progress = None
    assert (conversation.turns, text_of(conversation)) == before
    assert llm.kv_state() == state
    evaluated.clear()
    said(conversation.say("short", max_tokens=1))
    assert sum(evaluated) == conversation.turns[-1].answer_start - before[0][-1].end + 1


def test_the_limit_of_memory_holds(path: Path) -> None:
    counts: dict[int, int] = {}
    for mib in (0, 1, 2):
        conversation = Conversation(tiny_llama(path, **EVICTING, store_mib=mib))
        for i in range(8):
            said(conversation.say(MESSAGE * 4 + str(i), max_tokens=60))
            if i % 3 == 0:
                said(conversation.regenerate(max_tokens=100))
            assert n_stored(conversation).bytes <= mib * 2**20
        counts[mib] = n_stored(conversation).texts
        # the newest turn has its two snapshots
        turn, text = conversation.turns[-1], text_of(conversation)
        found = [conversation._text.n_to_read(text[:n]) for n in (turn.start, turn.answer_start)]
        assert (max(found) < MIN_SAVED) == (mib > 0)
    assert 0 == counts[0] < counts[1] < counts[2]


def test_no_copy_is_taken_that_nothing_can_need(path: Path) -> None:
    roomy = Conversation(tiny_llama(path, **ROOMY))
    said(roomy.say(MESSAGE * 4, max_tokens=100))
    said(roomy.say(MESSAGE * 4, max_tokens=100))
    assert n_stored(roomy).texts == 0
    said(roomy.say(MESSAGE * 99, max_tokens=1))
    assert n_stored(roomy).texts > 0
    roomy.clear()
    assert n_stored(roomy).texts == 0
    full = Conversation(tiny_llama(path, n_ctx=1024, evict=False))
    said(full.say(MESSAGE * 4, max_tokens=100))
    said(full.say(MESSAGE * 4, max_tokens=100))
    assert n_stored(full).texts == 0
    for wrong in (-1, 0.5, True):
        with pytest.raises(SettingsError, match="store_mib"):
            tiny_llama(path, store_mib=wrong)


def test_a_state_that_does_not_fit_is_read_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llama(path, **EVICTING)
    conversation = talk(llm)
    assert n_stored(conversation).texts > 0

    def refuse_state(*_: Any) -> None:
        llm.reset()
        raise StateError("no")

    monkeypatch.setattr(llm.text, "load_kv_state", refuse_state)
    before, start = n_evaluated(conversation), conversation.turns[-1].answer_start
    said(conversation.regenerate(max_tokens=SHORT))
    assert n_evaluated(conversation) - before == start + SHORT - 1
    assert in_cache(llm) == text_of(conversation)[:-1]
    check_positions(conversation)


@pytest.mark.parametrize("variant", ["sliding_window", "lfm2", "falcon-h1"])
@pytest.mark.parametrize("evict", [True, False])
def test_other_kinds_of_memory_go_back(
    tmp_path: Path, evaluated: list[int], variant: str, evict: bool
) -> None:
    n_layer = 3 if variant == "falcon-h1" else 4
    model = write_chat_gguf(
        tmp_path / "tiny.gguf", CHATML, n_layer=n_layer, arch_variant=variant, n_ctx_train=2048
    )
    settings = EVICTING if evict else {"n_ctx": 2048, "evict": False}
    llm = tiny_llama(model, **settings)
    conversation = talk(llm, 3)
    if evict or variant != "sliding_window":
        assert n_stored(conversation).texts > 0
        evaluated.clear()
        said(conversation.regenerate(max_tokens=1))
        assert sum(evaluated) <= MIN_SAVED
        conversation.undo()
        evaluated.clear()
        said(conversation.say("x", max_tokens=1))
        turn = conversation.turns[-1]
        assert sum(evaluated) <= turn.answer_start - turn.start + MIN_SAVED
    assert in_cache(llm) == text_of(conversation)[: llm.n_tokens]
    check_positions(conversation)


def test_a_saved_archive_goes_back_and_stays_what_was_saved(
    path: Path, tmp_path: Path, evaluated: list[int]
) -> None:
    """As a chat does: every answer is saved, and the next one is drawn again."""
    file = tmp_path / "chat"
    saved, memory = (Conversation(tiny_llama(path, **RECALLING)) for _ in range(2))
    for i in range(4):
        for conversation in (memory, saved):
            said(conversation.say(MESSAGE * 4 + str(i), max_tokens=LONG))
        saved.save(file)
        evaluated.clear()
        texts = [said(each.regenerate(max_tokens=LONG)) for each in (saved, memory)]
        assert texts[0] == texts[1]
        assert sum(evaluated) < 2 * (LONG + 3 * MIN_SAVED)
        assert saved.llm.kv.archived == memory.llm.kv.archived
        assert saved.llm.archive_trouble == ""
        saved.save(file)
    undone = saved.turns[1].end
    saved.undo()
    saved.undo()
    assert saved.llm.n_tokens > undone - MIN_SAVED
    said(saved.say("what now", max_tokens=LONG))
    saved.save(file)
    loaded = Conversation.load(file, tiny_llama(path, **RECALLING))
    assert loaded.llm.archive_trouble == ""
    assert loaded.llm.kv.archived == saved.llm.kv.archived


def test_an_archive_that_lacks_a_copys_rows_is_read_again(path: Path, tmp_path: Path) -> None:
    llm = tiny_llama(path, **RECALLING, recall_archive=tmp_path / "rows")
    conversation = talk(llm, 4)
    n_read = llm.n_tokens
    text, snapshots = text_of(conversation), llm.text.model.snapshots
    first, *_ = snapshots._snapshots
    last = snapshots._snapshots[-1]
    # back to where little was archived, and on with another text: its pages take the place
    snapshots._snapshots = [first, last]
    conversation._text.truncate(len(first.tokens))
    llm.text.read([7] * 300)
    snapshots._snapshots = [last]
    conversation._text.tokens = list(text)
    conversation._text.recover(n_read)
    assert (llm.n_tokens, n_stored(conversation).texts) == (0, 0)
    said(conversation.say("on", max_tokens=SHORT))
    assert in_cache(llm)[: len(text)] == text
    assert llm.text.archive_trouble == ""


def test_texts_of_an_engine_go_back_each_by_itself(path: Path) -> None:
    def another(engine: Engine, i: int) -> None:
        with llama_in(engine) as llm:
            llm.reset()
            conversation = talk(llm, system=f"You are number {i}.")
            said(conversation.regenerate(max_tokens=LONG))
            assert in_cache(llm) == text_of(conversation)[:-1]

    with tiny_engine(path, texts=2, **RECALLING) as engine:
        at_once([partial(another, engine, i) for i in range(2)])
        n_written = 2 * 3 * LONG
        assert engine.batches.tokens < n_written + 2 * (2 * 150 + 3 * MIN_SAVED)  # messages once
