"""Answers: how they end, what they leave, and what is refused."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from conversations import (
    EVICTING,
    FULL,
    ROOMY,
    SHORT,
    check_positions,
    in_cache,
    is_end,
    n_evaluated,
    said,
    stopping_at,
    text_of,
)
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError, SettingsError
from pyh2o.models import demo_model_path
from pyh2o.writing import answer as answer_module
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML
from tiny_llama import ONE_THREAD, tiny_llama


def test_a_turn_says_how_it_was(llm: Llama) -> None:
    conversation = Conversation(llm)
    answer = said(conversation.say("hello", max_tokens=SHORT))
    (turn,) = conversation.turns
    assert (turn.user, turn.answer, turn.finish, turn.attempt) == ("hello", answer, "length", 0)
    assert turn.end - turn.answer_start == SHORT
    assert turn.end == llm.n_tokens + 1


@pytest.mark.parametrize("saved", [False, True])
def test_a_message_without_an_answer_gets_another_seed(
    llm: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """Otherwise the model would have nothing to say to it for ever."""
    seeds: list[int] = []
    end = next(token for token in range(llm.n_vocab()) if is_end(llm, token))
    talking = answer_module.Writer

    class Silent(talking):  # type: ignore[misc, valid-type]
        def __init__(self, llm: Llama, sampling: Sampling, **before: Any) -> None:
            super().__init__(llm, sampling, **before)
            seeds.append(sampling.seed)

        def write(self, tokens: Sequence[int]) -> Generator[int]:
            words = super().write(tokens)
            next(words)
            yield end

    conversation = Conversation(llm)
    said(conversation.say("First.", max_tokens=SHORT))
    monkeypatch.setattr(answer_module, "Writer", Silent)
    for _ in range(2):
        assert said(conversation.say("Well?")) == ""
        assert said(conversation.regenerate()) == ""
        assert said(conversation.edit("First!")) == ""
    for first, second in zip(seeds[:3], seeds[3:], strict=True):
        assert first != second
    assert [turn.user for turn in conversation.turns] == ["First."]
    if saved:
        conversation.save(tmp_path / "x.h2o")
        conversation = Conversation.load(tmp_path / "x.h2o", llm)
    monkeypatch.setattr(answer_module, "Writer", talking)
    assert said(conversation.say("Well?", max_tokens=SHORT))
    assert conversation.turns[-1].attempt == 6
    assert said(conversation.say("And?", max_tokens=SHORT))
    assert conversation.turns[-1].attempt == 0


def test_nothing_happens_before_the_first_piece_is_asked_for(llm: Llama) -> None:
    conversation = Conversation(llm)
    conversation.say("hello")
    assert llm.n_tokens == 0
    assert conversation.turns == ()
    # the last one that was asked for counts
    first, second = conversation.say("one", max_tokens=3), conversation.say("two", max_tokens=3)
    assert said(first) == ""
    said(second)
    assert [turn.user for turn in conversation.turns] == ["two"]


def test_runs_can_be_repeated_and_attempts_differ(path: Path) -> None:
    def run(seed: int) -> list[str]:
        sampling = Sampling(seed=seed, temperature=1.0, top_k=0, top_p=1.0)
        conversation = Conversation(tiny_llama(path, **EVICTING), sampling=sampling)
        answers = [said(conversation.say("hello", max_tokens=20)) for _ in range(2)]
        answers += [said(conversation.regenerate(max_tokens=20)) for _ in range(2)]
        assert [turn.attempt for turn in conversation.turns] == [0, 2]
        return answers

    assert run(1) == run(1)
    assert len({*run(1), *run(2)}) == 8


def test_sampling_can_be_changed_between_turns(path: Path) -> None:
    greedy = Sampling(temperature=0.0)
    conversation = Conversation(tiny_llama(path, **EVICTING), sampling=Sampling(seed=1))
    said(conversation.say("hello", max_tokens=20))
    conversation.sampling = greedy
    first = said(conversation.regenerate(max_tokens=20))
    assert said(conversation.regenerate(max_tokens=20)) == first
    conversation.sampling = replace(greedy, temperature=1.0)
    assert said(conversation.regenerate(max_tokens=20)) != first


def test_a_stop_string_ends_an_answer_and_leaves_no_trace(
    path: Path, drawn: list[list[int]]
) -> None:
    llm = tiny_llama(path, **ROOMY)
    said(Conversation(llm).say("hello", max_tokens=60))
    whole = llm.detokenize(drawn[0])
    found = 0
    for place in range(1, len(whole) - 3):
        stop = whole[place : place + 3]
        if not stop.isascii() or whole.index(stop) != place:
            continue
        found += 1
        llm = tiny_llama(path, **ROOMY, chat_handler=stopping_at(stop.decode()))
        conversation = Conversation(llm)
        expected = whole[:place].decode(errors="ignore")
        assert said(conversation.say("hello", max_tokens=60)) == expected
        (turn,) = conversation.turns
        assert (turn.finish, turn.answer) == ("stop", expected)
        # Tokens stay that have a part of the answer in them, and no others.
        sizes = np.cumsum([len(llm.detokenize([token])) for token in drawn[-1]])
        n_tokens = turn.end - turn.answer_start
        assert n_tokens <= np.searchsorted(sizes, place) + 1
        kept = llm.detokenize(drawn[-1][:n_tokens]).decode(errors="ignore")
        assert kept.startswith(expected)
        before = n_evaluated(conversation)
        said(conversation.say("bye", max_tokens=2))
        turn = conversation.turns[1]
        assert turn.start == conversation.turns[0].end
        assert n_evaluated(conversation) - before <= turn.end - turn.start
        check_positions(conversation)
    assert found > 10


@pytest.mark.usefixtures("with_ends")
def test_the_models_end_is_fed_once() -> None:
    llm = Llama(str(demo_model_path()), n_ctx=512, verbose=False, **ONE_THREAD)
    conversation = Conversation(llm, sampling=Sampling(temperature=0.0))
    end = llm.tokenize(b"<|im_end|>", add_bos=False, special=True)
    said(conversation.say("Bye.", max_tokens=20))
    said(conversation.say("And now a long story.", max_tokens=5))
    said(conversation.say("Stop.", max_tokens=5))
    finishes = [turn.finish for turn in conversation.turns]
    assert finishes[:2] == ["stop", "length"]
    text = in_cache(llm)
    for turn, following in zip(conversation.turns, conversation.turns[1:], strict=False):
        assert end[0] not in text[turn.answer_start : turn.end]
        assert text[turn.end] == end[0]
        assert text[following.start : following.answer_start].count(end[0]) == 2
    # the opening has a system prompt of the model's own
    assert text.count(end[0]) == 1 + 2 * len(finishes) - 1


def ending_at(tokens: list[int]) -> Any:
    formatter = Jinja2ChatFormatter(CHATML, eos_token="", bos_token="<s>", stop_token_ids=tokens)
    return formatter.to_chat_handler()


def test_an_end_token_of_the_chat_format_is_no_part_of_the_answer(
    path: Path, drawn: list[list[int]]
) -> None:
    said(Conversation(tiny_llama(path, **ROOMY)).say("hello", max_tokens=20))
    end = drawn[0].index(drawn[0][7])
    assert end > 0
    llm = tiny_llama(path, **ROOMY, chat_handler=ending_at([drawn[0][7]]))
    conversation = Conversation(llm)
    said(conversation.say("hello", max_tokens=20))
    (turn,) = conversation.turns
    assert turn.finish == "stop"
    assert in_cache(llm)[turn.answer_start :] == drawn[0][:end]


@pytest.mark.parametrize("settings", [EVICTING, FULL])
def test_a_message_without_an_answer_is_taken_back(path: Path, settings: dict[str, Any]) -> None:
    llm = tiny_llama(path, **settings, chat_handler=ending_at(list(range(384))))
    conversation = Conversation(llm)
    for message in ("hello", "hello again"):
        assert list(conversation.say(message)) == []
        assert conversation.turns == ()
        assert text_of(conversation) == conversation._template.opening


def test_what_makes_no_sense_is_refused(llm: Llama) -> None:
    conversation = Conversation(llm)
    for change in (conversation.undo, lambda: said(conversation.regenerate())):
        with pytest.raises(PyH2OError, match="there is no message yet"):
            change()
    with pytest.raises(PyH2OError, match="there is no message yet"):
        said(conversation.edit("x"))
    for limit in (0, -1):
        with pytest.raises(SettingsError, match="max_tokens"):
            said(conversation.say("x", max_tokens=limit))
    assert llm.n_tokens == 0
    conversation.clear()


def test_text_that_is_no_unicode_is_refused(llm: Llama) -> None:
    conversation = Conversation(llm)
    for change in (
        lambda: said(conversation.say("\udcff")),
        lambda: Conversation(llm, system="\ud800"),
    ):
        with pytest.raises(PyH2OError, match="not Unicode"):
            change()
    said(conversation.say("日本 🙂 \0", max_tokens=SHORT))
