"""Interruptions: what was said is kept, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conversations import (
    EVICTING,
    FULL,
    SHORT,
    SYSTEM,
    Trap,
    check_positions,
    in_cache,
    said,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.cache import breaking
from tiny_llama import tiny_llama


def test_an_answer_that_is_left_early_is_kept(path: Path, drawn: list[list[int]]) -> None:
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm)
    for n_pieces in (1, 2, 5):
        answer = conversation.say("hello", max_tokens=40)
        pieces = [next(answer) for _ in range(n_pieces)]
        answer.close()
        turn = conversation.turns[-1]
        assert (turn.finish, turn.answer) == ("interrupted", "".join(pieces))
        assert text_of(conversation)[turn.answer_start :] == drawn[-1]
        check_positions(conversation)
    for _piece in conversation.say("a loop that is left", max_tokens=40):
        break
    assert len(conversation.turns) == 4


def test_a_left_answer_ends_with_the_next_call(llm: Llama) -> None:
    conversation = Conversation(llm)
    left = conversation.say("hello", max_tokens=40)
    piece = next(left)
    assert conversation.turns == ()
    said(conversation.say("bye", max_tokens=SHORT))
    assert [turn.answer for turn in conversation.turns[:1]] == [piece]
    assert list(left) == []
    left = conversation.regenerate(max_tokens=40)
    next(left)
    assert conversation.undo().finish == "interrupted"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("change", ["say", "edit", "regenerate"])
def test_ctrl_c_in_the_model_keeps_what_was_said(
    path: Path, trap: Trap, drawn: list[list[int]], change: str, after: bool
) -> None:
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm)
    said(conversation.say("hello", max_tokens=SHORT))
    for n_drawn in (1, 2, 7):
        answer = {
            "say": lambda: conversation.say("more", max_tokens=40),
            "edit": lambda: conversation.edit("other", max_tokens=40),
            "regenerate": lambda: conversation.regenerate(max_tokens=40),
        }[change]()
        trap.countdown, trap.after = n_drawn, after
        n_answers = len(drawn)
        trap.passes = lambda *_, n=n_answers: len(drawn) == n or not drawn[-1]  # the reading
        pieces: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            pieces.extend(answer)
        turn = conversation.turns[-1]
        assert turn.finish == "interrupted"
        assert len(drawn[-1]) == n_drawn
        assert text_of(conversation)[turn.answer_start :] == drawn[-1]
        # the next turn begins with the token that was not evaluated
        text = text_of(conversation)
        said(conversation.say("next", max_tokens=SHORT))
        assert in_cache(llm)[: len(text)] == text
        check_positions(conversation)


@pytest.mark.parametrize(
    ("error", "countdown"), [(KeyboardInterrupt, 1), (RuntimeError, 1), (RuntimeError, 4)]
)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("settings", [EVICTING, FULL])
def test_an_error_changes_nothing(
    path: Path,
    trap: Trap,
    settings: dict[str, Any],
    error: type[BaseException],
    countdown: int,
    after: bool,
) -> None:
    llm = tiny_llama(path, **settings)
    conversation = Conversation(llm, system=SYSTEM)
    answers = [
        lambda: conversation.say("one", max_tokens=SHORT),
        lambda: conversation.say("two", max_tokens=SHORT),
        lambda: conversation.regenerate(max_tokens=SHORT),
        lambda: conversation.edit("three", max_tokens=SHORT),
    ]
    for answer in answers:
        before = conversation.turns, text_of(conversation)
        trap.countdown, trap.error, trap.after = countdown, error, after
        with pytest.raises(error):
            said(answer())
        assert (conversation.turns, text_of(conversation)) == before
        # and the same again without an error
        said(answer())
        check_positions(conversation)
        assert in_cache(llm) == text_of(conversation)[:-1]
    assert [turn.user for turn in conversation.turns] == ["one", "three"]


def test_ctrl_c_while_a_long_message_is_read(path: Path) -> None:
    llm = tiny_llama(path, **EVICTING, n_batch=16)
    told: list[int] = []
    conversation = Conversation(llm, on_recompute=told.append, copies_mib=0)
    said(conversation.say("hello", max_tokens=SHORT))
    before = conversation.turns, text_of(conversation)

    def on_progress(done: int, _total: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    llm.prompt_progress = on_progress
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * 100, max_tokens=SHORT))
    assert (conversation.turns, text_of(conversation)) == before
    llm.prompt_progress = None
    said(conversation.say("short", max_tokens=SHORT))
    # what the long message had pushed out came back
    assert told == [conversation.turns[1].start]
    assert in_cache(llm)[: len(before[1])] == before[1]


@pytest.mark.parametrize("n_words", [6, 40])
def test_ctrl_c_while_a_batch_is_computed(
    path: Path, monkeypatch: pytest.MonkeyPatch, n_words: int
) -> None:
    """The batch leaves no trace: only what was evicted for those before it is read again."""
    monkeypatch.setattr(breaking, "INTERVAL", 0)
    llm = tiny_llama(path, **EVICTING)
    told: list[int] = []
    conversation = Conversation(llm, on_recompute=told.append, copies_mib=0)
    said(conversation.say("hello", max_tokens=SHORT))
    before = conversation.turns, text_of(conversation)
    asked: list[int] = []

    def press() -> None:
        asked.append(llm.n_tokens)
        if len(asked) > 20 and (n_words == 6 or llm.kv.compactions):
            raise KeyboardInterrupt

    llm.text.while_reading = press
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * n_words, max_tokens=SHORT))
    llm.text.while_reading = None
    assert (conversation.turns, text_of(conversation)) == before
    assert in_cache(llm) == before[1][: llm.n_tokens]
    said(conversation.say("short", max_tokens=SHORT))
    assert bool(told) == (n_words == 40)
    assert in_cache(llm)[: len(before[1])] == before[1]


def test_ctrl_c_in_a_batch_that_has_evicted(path: Path, trap: Trap) -> None:
    llm = tiny_llama(path, **EVICTING)
    told: list[int] = []
    conversation = Conversation(llm, on_recompute=told.append, copies_mib=0)
    said(conversation.say("hello", max_tokens=SHORT))
    before = text_of(conversation)
    n_tokens = llm.n_tokens
    trap.countdown, trap.after = 5, True  # those before fill the cache
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * 40, max_tokens=SHORT))
    # The model has not recorded the batch, but rows from before it are gone: nothing is left.
    assert (llm.n_tokens, text_of(conversation)) == (0, before)
    said(conversation.say("short", max_tokens=SHORT))
    assert told == [n_tokens + 1]  # the last token of the answer was read with the message
    assert in_cache(llm)[: len(before)] == before


def test_ctrl_c_while_evicted_rows_are_read_again(path: Path) -> None:
    llm = tiny_llama(path, **EVICTING, n_batch=16)
    told: list[int] = []
    conversation = Conversation(llm, on_recompute=told.append, copies_mib=0)
    said(conversation.say("hello", max_tokens=100))
    said(conversation.say("go on", max_tokens=150))
    before = conversation.turns, text_of(conversation)
    n_kept = conversation.turns[1].answer_start - 1

    def on_progress(done: int, _total: int) -> None:
        if done > 60:
            raise KeyboardInterrupt

    llm.prompt_progress = on_progress
    with pytest.raises(KeyboardInterrupt):
        said(conversation.regenerate(max_tokens=SHORT))
    assert told.pop() == n_kept
    # the old answer is still there, to be read again
    assert (conversation.turns, text_of(conversation)) == before
    assert 60 < llm.n_tokens < n_kept
    llm.prompt_progress = None
    said(conversation.say("bye", max_tokens=SHORT))
    assert in_cache(llm)[: len(before[1])] == before[1]
    # all that had been evaluated once but the tokens that were read again before the Ctrl-C
    assert told == [len(before[1]) - 1 - 64]


def test_an_error_in_a_callback_changes_nothing(path: Path) -> None:
    def fail(_n_tokens: int) -> None:
        raise ZeroDivisionError

    conversation = Conversation(tiny_llama(path, **EVICTING), on_recompute=fail, copies_mib=0)
    said(conversation.say("hello", max_tokens=200))
    before = conversation.turns, text_of(conversation)
    with pytest.raises(ZeroDivisionError):
        said(conversation.regenerate(max_tokens=SHORT))
    assert (conversation.turns, text_of(conversation)) == before
