"""Conversations: the text in the cache is what was said, whatever happens between two turns."""

from __future__ import annotations

import gc
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp.llama_chat_format import (
    ChatFormatterResponse,
    Jinja2ChatFormatter,
    chat_formatter_to_chat_completion_handler,
)

import pyh2o
from pyh2o import Conversation, Llama, Turn
from pyh2o.errors import (
    ContextLimitError,
    PyH2OError,
    SessionError,
    SettingsError,
    UnsupportedModelError,
)
from pyh2o.generation.sampling import Sampling
from pyh2o.generation.writer import Writer
from pyh2o.llama import KV_TYPES
from pyh2o.models import demo_model_path
from pyh2o.sessions import conversation as conversation_module
from pyh2o.sessions.turns import answer_seed
from pyh2o.text.chat_template import ChatTemplate
from tiny_chat import CHATML, GEMMA, LLAMA_2, write_chat_gguf
from tiny_llama import ONE_THREAD, tiny_llama

# The model is random, so its answers are too; without a limit they would not end.
SHORT = 9
EVICTING = {"n_ctx": 400, "hh": 60, "recent": 60, "slack": 40}
# Rows that are not rounded, because these two are compared.
EXACT = {"type_k": KV_TYPES["f32"], "type_v": KV_TYPES["f32"], "flash_attn": False}
ROOMY = {"n_ctx": 2000, "hh": 1000, "recent": 1000, **EXACT}
FULL = {"n_ctx": 2048, "evict": False, **EXACT}
SYSTEM = "Speak like a pirate."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", CHATML, n_layer=2)


@pytest.fixture
def llm(path: Path) -> Llama:
    return tiny_llama(path, **EVICTING)


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What every writer has drawn, one list each; answers do not end by themselves.

    A random model ends one answer in a hundred at any token, and tests should not depend on which.
    """
    lists: list[list[int]] = []

    class Endless(Writer):
        def __init__(self, llm: Llama, sampling: Sampling) -> None:
            ends = [token for token in range(llm.n_vocab()) if is_end(llm, token)]

            def ban_ends(_tokens: Any, logits: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
                logits[ends] = -np.inf
                return logits

            super().__init__(llm, sampling, logits_processor=ban_ends)

        def write(self, tokens: Sequence[int]) -> Generator[int]:
            lists.append([])
            for token in super().write(tokens):
                lists[-1].append(token)
                yield token

    monkeypatch.setattr(conversation_module, "Writer", Endless)
    return lists


def is_end(llm: Llama, token: int) -> bool:
    return bool(llama_cpp.llama_vocab_is_eog(llm._model.vocab, token))


@pytest.fixture
def with_ends(drawn: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end where the model ends them."""

    class Recording(Writer):
        def write(self, tokens: Sequence[int]) -> Generator[int]:
            drawn.append([])
            for token in super().write(tokens):
                if not is_end(self._llm, token):
                    drawn[-1].append(token)
                yield token

    monkeypatch.setattr(conversation_module, "Writer", Recording)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each evaluation had, of all models."""
    counts: list[int] = []
    evaluate = llama_cpp.Llama.eval

    def counting(llm: Llama, tokens: Sequence[int]) -> None:
        evaluate(llm, tokens)
        counts.append(len(tokens))

    monkeypatch.setattr(llama_cpp.Llama, "eval", counting)
    return counts


def said(answer: Generator[str]) -> str:
    return "".join(answer)


def refuse(n_tokens: int) -> None:
    pytest.fail(f"{n_tokens} tokens are read again")


def text_of(conversation: Conversation) -> list[int]:
    return list(conversation._text.tokens)


def in_cache(llm: Llama) -> list[int]:
    tokens: list[int] = llm.input_ids[: llm.n_tokens].tolist()
    return tokens


def next_logits(llm: Llama) -> npt.NDArray[np.single]:
    """Logits behind the newest token, which must have been evaluated last."""
    logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(logits, shape=(llm.n_vocab(),)).copy()


def check_positions(conversation: Conversation) -> None:
    """The turns lie one behind the other: the first behind the opening, the last ends the text."""
    if not conversation.turns:
        return
    text, opening = text_of(conversation), conversation._template.opening
    place = conversation.turns[0].start
    assert text[:place] == opening[:place]
    # A first message may make one token with the opening's last.
    assert len(opening) - 1 <= place <= len(opening)
    for turn in conversation.turns:
        assert turn.start == place
        assert turn.start < turn.answer_start < turn.end
        place = turn.end
    assert place == len(text)


# -------------------------------------------------------------------------------------------------
# What is fed
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, SYSTEM])
@pytest.mark.parametrize("template", [CHATML, LLAMA_2])
def test_text_is_what_was_generated_and_what_the_template_writes(
    tmp_path: Path, drawn: list[list[int]], template: str, system: str | None
) -> None:
    path = write_chat_gguf(tmp_path / "tiny.gguf", template, n_layer=1)
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm, system=system)
    messages = ["hello", "and <|im_end|> you?", "", "bye " * 30]
    for message in messages:
        said(conversation.say(message, max_tokens=SHORT))
    parts = ChatTemplate(llm, system)
    expected = parts.first_turn(messages[0]) + drawn[0]
    for message, tokens in zip(messages[1:], drawn[1:], strict=True):
        expected += parts.next_turn(message) + tokens
    assert text_of(conversation) == expected
    # all but the token that was drawn last
    assert in_cache(llm) == expected[:-1]
    for turn, tokens in zip(conversation.turns, drawn, strict=True):
        assert expected[turn.answer_start : turn.end] == tokens
    check_positions(conversation)
    assert llm.kv.compactions > 0


@pytest.mark.usefixtures("with_ends")
def test_first_answer_is_that_of_llama_cpp(path: Path) -> None:
    llm = tiny_llama(path, **EVICTING)
    sampling = Sampling(temperature=0.9, seed=7)
    answer = said(Conversation(llm, system=SYSTEM, sampling=sampling).say("hello", max_tokens=40))
    other = tiny_llama(path, **EVICTING).create_chat_completion(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}],
        temperature=0.9,
        repeat_penalty=1.1,
        max_tokens=40,
        seed=answer_seed(7, 0, 0),
    )
    assert answer == other["choices"][0]["message"]["content"] != ""


def test_a_long_dialogue_evaluates_every_token_once(
    llm: Llama, drawn: list[list[int]], evaluated: list[int]
) -> None:
    conversation = Conversation(llm, on_recompute=refuse)
    parts = ChatTemplate(llm, None)
    n_new = 0
    for i in range(200):
        message = f"this is message {i}"
        said(conversation.say(message, max_tokens=SHORT))
        n_new += len((parts.next_turn if i else parts.first_turn)(message)) + len(drawn[-1])
    assert len(conversation.turns) == 200
    assert n_new > 10 * llm.kv.capacity
    # the token drawn last waits for the next turn
    assert conversation.tokens_evaluated == sum(evaluated) == llm.n_tokens == n_new - 1
    check_positions(conversation)


def test_work_for_a_turn_does_not_grow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llama(path, **EVICTING)
    # its growth would be counted in the turn in which it happens
    llm._grow_record(20_000)
    tokenized: list[int] = []
    tokenize = llm.tokenize

    def counting(text: bytes, **settings: Any) -> list[int]:
        tokenized.append(len(text))
        return tokenize(text, **settings)

    monkeypatch.setattr(llm, "tokenize", counting)
    conversation = Conversation(llm)

    work: list[int] = []

    def turn() -> None:
        tokenized.clear()
        said(conversation.say("what was said before does not matter", max_tokens=SHORT))
        work.append(sum(tokenized))

    def peak_of_a_turn() -> int:
        gc.collect()
        tracemalloc.start()
        turn()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    gc.freeze()  # the objects of all other tests, which each collection would look through
    for _ in range(10):
        turn()
    early = [peak_of_a_turn() for _ in range(11)]
    for _ in range(110):
        turn()
    late = [peak_of_a_turn() for _ in range(11)]
    gc.unfreeze()
    assert len(set(work[1:])) == 1
    # A list of the text's 8,000 tokens would take 60 kB.
    assert np.median(late) < np.median(early) + 10_000


def test_rows_in_the_cache_are_those_of_the_text(path: Path) -> None:
    llm, other = tiny_llama(path, **ROOMY), tiny_llama(path, **FULL)
    conversation = Conversation(llm, system=SYSTEM)
    for message in ("hello", "how are you?", "bye"):
        said(conversation.say(message, max_tokens=SHORT))
    said(conversation.regenerate(max_tokens=SHORT))
    conversation.undo()
    said(conversation.edit("what?", max_tokens=1))
    text = text_of(conversation)
    llm.eval(text[llm.n_tokens :])
    other.eval(text)
    np.testing.assert_allclose(next_logits(llm), next_logits(other), atol=1e-4)


# -------------------------------------------------------------------------------------------------
# Answers
# -------------------------------------------------------------------------------------------------


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
    talking = conversation_module.Writer

    class Silent(talking):  # type: ignore[misc, valid-type]
        def __init__(self, llm: Llama, sampling: Sampling) -> None:
            super().__init__(llm, sampling)
            seeds.append(sampling.seed)

        def write(self, tokens: Sequence[int]) -> Generator[int]:
            words = super().write(tokens)
            next(words)
            yield end

    conversation = Conversation(llm)
    said(conversation.say("First.", max_tokens=SHORT))
    monkeypatch.setattr(conversation_module, "Writer", Silent)
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
    monkeypatch.setattr(conversation_module, "Writer", talking)
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


def test_pieces_are_whole_characters(path: Path, drawn: list[list[int]]) -> None:
    sampling = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
    llm = tiny_llama(path, **EVICTING)
    conversation = Conversation(llm, sampling=sampling)
    pieces = list(conversation.say("hello", max_tokens=600))
    assert "" not in pieces
    # most tokens of this model are single bytes
    assert len(pieces) < len(drawn[0]) < sum(map(len, pieces)) * 4
    whole = llm.detokenize(drawn[0]).decode(errors="ignore")
    assert "".join(pieces) == conversation.turns[0].answer == whole


def stopping_at(*stops: str) -> Any:
    """A chat format like ChatML with these stop strings."""
    formatter = Jinja2ChatFormatter(CHATML, eos_token="", bos_token="<s>")

    def with_stops(**request: Any) -> ChatFormatterResponse:
        return replace(formatter(**request), stop=list(stops))

    return chat_formatter_to_chat_completion_handler(with_stops)


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
        conversation = Conversation(llm, on_recompute=refuse)
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
        before = conversation.tokens_evaluated
        said(conversation.say("bye", max_tokens=2))
        turn = conversation.turns[1]
        assert turn.start == conversation.turns[0].end
        assert conversation.tokens_evaluated - before <= turn.end - turn.start
        check_positions(conversation)
    assert found > 10


def test_a_stop_string_at_once_takes_the_message_back(path: Path) -> None:
    first = next(Conversation(tiny_llama(path, **ROOMY)).say("hello"))
    llm = tiny_llama(path, **ROOMY, chat_handler=stopping_at(first[0]))
    conversation = Conversation(llm)
    assert list(conversation.say("hello", max_tokens=40)) == []
    assert conversation.turns == ()
    assert text_of(conversation) == conversation._template.opening


@pytest.mark.usefixtures("with_ends")
def test_the_models_end_is_fed_once() -> None:
    llm = Llama(str(demo_model_path()), n_ctx=512, verbose=False, **ONE_THREAD)
    conversation = Conversation(llm, sampling=Sampling(temperature=0.0))
    end = llm.tokenize(b"<|im_end|>", add_bos=False, special=True)
    for i in range(3):
        said(conversation.say(f"Say only the number {i}.", max_tokens=60))
    said(conversation.say("And now a long story.", max_tokens=20))
    said(conversation.say("Stop."))
    finishes = [turn.finish for turn in conversation.turns]
    assert finishes[3] == "length"
    assert "stop" in finishes
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
    conversation = Conversation(llm, on_recompute=refuse)
    for message in ("hello", "hello again"):
        assert list(conversation.say(message)) == []
        assert conversation.turns == ()
        assert text_of(conversation) == conversation._template.opening


def test_what_makes_no_sense_is_refused(llm: Llama) -> None:
    conversation = Conversation(llm)
    for change in (conversation.undo, lambda: said(conversation.regenerate())):
        with pytest.raises(PyH2OError, match="nothing has been said"):
            change()
    with pytest.raises(PyH2OError, match="nothing has been said"):
        said(conversation.edit("x"))
    for limit in (0, -1):
        with pytest.raises(SettingsError, match="max_tokens"):
            said(conversation.say("x", max_tokens=limit))
    assert llm.n_tokens == 0
    conversation.clear()


def test_refused_messages_change_nothing(path: Path) -> None:
    template = "{% if 'bad' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}"
    formatter = Jinja2ChatFormatter(template + CHATML, eos_token="", bos_token="<s>")
    llm = tiny_llama(path, **EVICTING, chat_handler=formatter.to_chat_handler())
    conversation = Conversation(llm)
    said(conversation.say("good", max_tokens=SHORT))
    before = (conversation.turns, text_of(conversation), llm.n_tokens)
    for answer in (conversation.say, conversation.edit):
        with pytest.raises(UnsupportedModelError, match="no"):
            said(answer("bad"))
        assert (conversation.turns, text_of(conversation), llm.n_tokens) == before


# -------------------------------------------------------------------------------------------------
# Limits
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "settings", "finish", "cure"),
    [
        ("llama", {"n_ctx": 256, "evict": False}, "length", "turn eviction on"),
        ("learned_positions", {"hh": 60, "recent": 60}, "trained_context", "new conversation"),
    ],
)
def test_the_end_of_all_positions(
    tmp_path: Path, variant: str, settings: dict[str, Any], finish: str, cure: str
) -> None:
    path = write_chat_gguf(
        tmp_path / "tiny.gguf", CHATML, arch_variant=variant, n_ctx_train=256, n_layer=1
    )
    # long enough to reach the limit, with no end
    greedy = Sampling(temperature=0.0, repeat_penalty=1.0)
    llm = tiny_llama(path, **settings)
    conversation = Conversation(llm, sampling=greedy)
    said(conversation.say("hello", max_tokens=100))
    with pytest.raises(ContextLimitError, match=cure) as error:
        said(conversation.say("x" * 500))
    assert "\n" not in str(error.value)
    assert len(conversation.turns) == 1
    said(conversation.say("go on"))
    assert conversation.turns[-1].finish == finish
    assert conversation.turns[-1].end == 256 + 1
    with pytest.raises(ContextLimitError, match=cure):
        said(conversation.say("and now?"))
    said(conversation.edit("less", max_tokens=SHORT))
    assert [turn.user for turn in conversation.turns] == ["hello", "less"]
    check_positions(conversation)


def test_the_last_position_can_be_used(path: Path) -> None:
    llm = tiny_llama(path, n_ctx=256, evict=False)
    opening = len(ChatTemplate(llm, None).first_turn(""))
    for room in (2, 1, 0):
        conversation = Conversation(llm)
        answer = conversation.say("\u0001" * (256 - opening - room))
        if room == 0:
            with pytest.raises(ContextLimitError, match="no room for an answer in 256"):
                said(answer)
        else:
            said(answer)
            (turn,) = conversation.turns
            assert turn.end - turn.answer_start == room + 1


@pytest.mark.parametrize("scheme", ["original", "dense"])
def test_a_text_without_an_end(tmp_path: Path, scheme: str, drawn: list[list[int]]) -> None:
    path = write_chat_gguf(tmp_path / "tiny.gguf", CHATML, n_ctx_train=256, n_layer=1)
    llm = tiny_llama(path, hh=60, recent=60, slack=40, positions=scheme)
    conversation = Conversation(llm, system=SYSTEM, on_recompute=refuse)
    for _ in range(30):
        said(conversation.say("go on", max_tokens=SHORT))
    assert llm.n_tokens > 3 * 256
    assert llm.kv.rebases > 0
    turn = conversation.turns[-1]
    assert text_of(conversation)[turn.answer_start :] == drawn[-1]


# -------------------------------------------------------------------------------------------------
# The system prompt
# -------------------------------------------------------------------------------------------------


def held_by_all(llm: Llama) -> set[int]:
    """Positions that every layer and KV head holds."""
    rows = [set(head) for layer in range(2) for head in llm.kv_rows(layer)[0].tolist()]
    return set.intersection(*rows)


@pytest.mark.parametrize("system", [None, SYSTEM])
def test_the_opening_is_never_evicted(path: Path, system: str | None) -> None:
    # plain H2O would not keep it: see below
    llm = tiny_llama(path, n_ctx=400, hh=80, recent=20, slack=20)
    conversation = Conversation(llm, system=system)
    opening = conversation._template.opening
    for _ in range(20):
        said(conversation.say("what do you think of it?", max_tokens=SHORT))
    assert llm.kv.pinned == len(opening) > 5
    assert in_cache(llm)[: len(opening)] == opening
    assert held_by_all(llm) >= set(range(len(opening)))
    conversation.undo()
    conversation.clear()
    for _ in range(20):
        said(conversation.say("and now?", max_tokens=SHORT))
    assert held_by_all(llm) >= set(range(len(opening)))

    plain = tiny_llama(path, n_ctx=400, hh=80, recent=20, slack=20)
    plain.eval(in_cache(llm))
    assert not held_by_all(plain) >= set(range(len(opening)))


def test_pinned_rows_of_the_settings_stay(path: Path) -> None:
    llm = tiny_llama(path, n_ctx=400, hh=80, recent=20, pinned=70, slack=20)
    conversation = Conversation(llm)
    assert len(conversation._template.opening) < 70 == llm.kv.pinned
    said(conversation.say("hello", max_tokens=SHORT))
    assert llm.kv.pinned == 70


def test_a_system_prompt_that_does_not_fit_is_refused(path: Path) -> None:
    llm = tiny_llama(path, n_ctx=400, hh=20, recent=60)
    first = Conversation(llm)
    said(first.say("hello", max_tokens=SHORT))
    # the template's own prompt is only pinned where it fits
    assert llm.kv.pinned == 0
    before = in_cache(llm)
    for make in (lambda: Conversation(llm, system=SYSTEM), lambda: first.set_system(SYSTEM)):
        with pytest.raises(SettingsError, match=r"20 rows .* raise hh") as error:
            make()
        assert "\n" not in str(error.value)
    # and what was there is still there
    assert in_cache(llm) == before
    said(first.say("bye", max_tokens=SHORT))
    assert first.system is None


def test_a_template_without_a_place_for_it_is_refused(path: Path) -> None:
    handler = Jinja2ChatFormatter(GEMMA, eos_token="", bos_token="<s>").to_chat_handler()
    llm = tiny_llama(path, **EVICTING, chat_handler=handler)
    with pytest.raises(SettingsError, match="system prompt"):
        Conversation(llm, system=SYSTEM)
    conversation = Conversation(llm)
    said(conversation.say("hello", max_tokens=SHORT))
    turns = conversation.turns
    with pytest.raises(SettingsError, match="system prompt"):
        conversation.set_system(SYSTEM)
    assert conversation.turns == turns


def test_another_system_prompt_is_read_with_all_turns(
    llm: Llama, drawn: list[list[int]], evaluated: list[int]
) -> None:
    recomputed: list[int] = []
    conversation = Conversation(llm, on_recompute=recomputed.append)
    said(conversation.say("one", max_tokens=SHORT))
    said(conversation.say("two", max_tokens=SHORT))
    conversation.set_system(SYSTEM)
    assert conversation.system == SYSTEM
    check_positions(conversation)
    parts = ChatTemplate(llm, SYSTEM)
    expected = parts.first_turn("one") + drawn[0] + parts.next_turn("two") + drawn[1]
    assert text_of(conversation) == expected
    evaluated.clear()
    said(conversation.say("three", max_tokens=1))
    assert recomputed == [len(expected)]
    assert sum(evaluated) == len(expected) + len(parts.next_turn("three"))
    assert in_cache(llm) == expected + parts.next_turn("three")
    assert llm.kv.pinned == len(parts.opening)
    # back to the template's own, with nothing said
    conversation.clear()
    conversation.set_system(None)
    recomputed.clear()
    said(conversation.say("four", max_tokens=1))
    assert in_cache(llm) == ChatTemplate(llm, None).first_turn("four")
    assert recomputed == []


# -------------------------------------------------------------------------------------------------
# Regenerate, undo, edit
# -------------------------------------------------------------------------------------------------


def test_nothing_is_read_again_while_rows_are_there(
    path: Path, drawn: list[list[int]], evaluated: list[int]
) -> None:
    llm = tiny_llama(path, **ROOMY)
    conversation = Conversation(llm, on_recompute=refuse)
    for message in ("one", "two", "three"):
        said(conversation.say(message, max_tokens=SHORT))
    parts = ChatTemplate(llm, None)
    start = conversation.turns[2].start
    text = text_of(conversation)[:start]

    evaluated.clear()
    said(conversation.regenerate(max_tokens=SHORT))
    assert evaluated == [1] * SHORT
    assert text_of(conversation) == text + parts.next_turn("three") + drawn[-1]

    evaluated.clear()
    said(conversation.edit("four", max_tokens=SHORT))
    assert evaluated == [len(parts.next_turn("four"))] + [1] * (SHORT - 1)
    assert text_of(conversation) == text + parts.next_turn("four") + drawn[-1]
    assert conversation.turns[2].user == "four"

    evaluated.clear()
    assert conversation.undo().user == "four"
    assert text_of(conversation) == text
    assert conversation.undo().user == "two"
    assert [turn.user for turn in conversation.turns] == ["one"]
    said(conversation.say("five", max_tokens=1))
    assert evaluated == [len(parts.next_turn("five"))]

    evaluated.clear()
    conversation.clear()
    assert (conversation.turns, evaluated) == ((), [])
    said(conversation.say("six", max_tokens=1))
    assert in_cache(llm) == parts.first_turn("six")
    assert sum(evaluated) == len(parts.first_turn("six")) - len(parts.opening)


def test_the_first_message_can_be_edited(path: Path, evaluated: list[int]) -> None:
    llm = tiny_llama(path, **ROOMY)
    conversation = Conversation(llm, on_recompute=refuse)
    said(conversation.say("hello", max_tokens=SHORT))
    evaluated.clear()
    for message in ("goodbye", " a", "\n\n", ""):
        said(conversation.edit(message, max_tokens=1))
        whole = ChatTemplate(llm, None).first_turn(message)
        assert in_cache(llm) == whole
        assert evaluated.pop() <= len(whole) - len(conversation._template.opening) + 1
        assert evaluated == []
        check_positions(conversation)


def test_a_first_message_may_be_one_token_with_what_is_before() -> None:
    llm = Llama(str(demo_model_path()), n_ctx=512, verbose=False, **ONE_THREAD)
    conversation = Conversation(llm, on_recompute=refuse)
    opening = conversation._template.opening
    for message in ("\n\nhello", "hello", "\n", "\n\n\n", ""):
        whole = ChatTemplate(llm, None).first_turn(message)
        assert (whole[: len(opening)] == opening) == (not message.startswith("\n"))
        for change in (conversation.say, conversation.edit, conversation.edit):
            said(change(message, max_tokens=1))
            assert in_cache(llm) == whole
            check_positions(conversation)
        conversation.clear()
    said(conversation.say("\n", max_tokens=1))
    conversation.set_system(SYSTEM)
    check_positions(conversation)
    assert text_of(conversation)[:-1] == ChatTemplate(llm, SYSTEM).first_turn("\n")


def test_going_back_is_as_if_it_had_not_been(path: Path) -> None:
    greedy = Sampling(temperature=0.0)
    straight = Conversation(tiny_llama(path, **ROOMY), sampling=greedy)
    winding = Conversation(tiny_llama(path, **ROOMY), sampling=greedy)
    said(straight.say("hello", max_tokens=SHORT))
    said(winding.say("no", max_tokens=SHORT))
    said(winding.edit("hello", max_tokens=SHORT))
    said(winding.say("nothing", max_tokens=30))
    winding.undo()
    said(winding.regenerate(max_tokens=SHORT))
    answers = [said(each.say("bye", max_tokens=SHORT)) for each in (straight, winding)]
    assert answers[0] == answers[1]
    assert text_of(straight) == text_of(winding)


def test_what_was_evicted_is_read_again_and_said_before(
    llm: Llama, drawn: list[list[int]], evaluated: list[int]
) -> None:
    told: list[tuple[int, int]] = []
    conversation = Conversation(
        llm, on_recompute=lambda n_tokens: told.append((n_tokens, sum(evaluated)))
    )
    said(conversation.say("one", max_tokens=SHORT))
    said(conversation.say("two", max_tokens=150))
    parts = ChatTemplate(llm, None)
    first, second = conversation.turns
    text = text_of(conversation)
    assert not llm.can_remove_tail(second.answer_start)

    evaluated.clear()
    said(conversation.regenerate(max_tokens=150))
    assert told == [(second.answer_start - 1, 0)]
    assert sum(evaluated) == second.answer_start + 149
    assert text_of(conversation) == text[: second.answer_start] + drawn[-1]

    told.clear()
    evaluated.clear()
    said(conversation.edit("three", max_tokens=150))
    assert told == [(second.start, 0)]
    assert text_of(conversation) == text[: first.end] + parts.next_turn("three") + drawn[-1]

    told.clear()
    evaluated.clear()
    conversation.undo()
    # no work until it is needed
    assert (told, evaluated) == ([], [])
    assert text_of(conversation) == text[: first.end]
    conversation.undo()
    said(conversation.say("four", max_tokens=1))
    opening = len(parts.opening)
    assert told == [(opening, 0)]
    assert sum(evaluated) == len(parts.first_turn("four"))
    assert in_cache(llm) == parts.first_turn("four")


def test_half_of_the_recent_rows_are_enough_to_go_back(llm: Llama) -> None:
    recent = EVICTING["recent"]
    was_free: list[bool] = []
    for n_tokens in range(1, 70, 3):
        told: list[int] = []
        conversation = Conversation(llm, on_recompute=told.append)
        said(conversation.say("one", max_tokens=140))
        said(conversation.say("two", max_tokens=n_tokens))
        end = conversation.turns[0].end
        conversation.undo()
        was_free.append(llm.n_tokens > 0)
        if was_free[-1]:
            assert held_by_all(llm) >= set(range(end - recent // 2, end))
        said(conversation.say("three", max_tokens=1))
        assert told == ([] if was_free[-1] else [end])
    assert was_free[0]
    assert not was_free[-1]


# -------------------------------------------------------------------------------------------------
# Interruptions
# -------------------------------------------------------------------------------------------------


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


@dataclass
class Trap:
    """Makes the nth of some calls raise, before or after it was made."""

    countdown: int = -1
    error: type[BaseException] = KeyboardInterrupt
    after: bool = False
    passes: Callable[..., bool] = lambda *_: False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.passes(*args):
                return call(*args, **kwargs)
            self.countdown -= 1
            if self.countdown == 0 and not self.after:
                raise self.error
            result = call(*args, **kwargs)
            if self.countdown == 0:
                raise self.error
            return result

        return wrapped


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Trap:
    """In the decoding of a batch, before its tokens are recorded."""
    trap = Trap()
    decode = trap.around(llama_cpp._internals.LlamaContext.decode)
    monkeypatch.setattr(llama_cpp._internals.LlamaContext, "decode", decode)
    return trap


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
    conversation = Conversation(llm, on_recompute=told.append)
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


def test_ctrl_c_in_a_batch_that_has_evicted(path: Path, trap: Trap) -> None:
    llm = tiny_llama(path, **EVICTING)
    told: list[int] = []
    conversation = Conversation(llm, on_recompute=told.append)
    said(conversation.say("hello", max_tokens=SHORT))
    before = text_of(conversation)
    n_tokens = llm.n_tokens
    trap.countdown, trap.after = 2, True  # the first batch fills the cache
    with pytest.raises(KeyboardInterrupt):
        said(conversation.say("long " * 40, max_tokens=SHORT))
    # The model has not recorded the batch, but rows from before it are gone.
    assert llm.kv.compactions > 0
    assert (llm.n_tokens, text_of(conversation)) == (0, before)
    said(conversation.say("short", max_tokens=SHORT))
    assert told == [n_tokens + 1]  # the last token of the answer was in the first batch
    assert in_cache(llm)[: len(before)] == before


def test_ctrl_c_while_evicted_rows_are_read_again(path: Path) -> None:
    llm = tiny_llama(path, **EVICTING, n_batch=16)
    told: list[int] = []
    conversation = Conversation(llm, on_recompute=told.append)
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

    conversation = Conversation(tiny_llama(path, **EVICTING), on_recompute=fail)
    said(conversation.say("hello", max_tokens=200))
    before = conversation.turns, text_of(conversation)
    with pytest.raises(ZeroDivisionError):
        said(conversation.regenerate(max_tokens=SHORT))
    assert (conversation.turns, text_of(conversation)) == before


# -------------------------------------------------------------------------------------------------
# One model, one text
# -------------------------------------------------------------------------------------------------


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


def test_a_conversation_ends_even_if_nothing_was_said(llm: Llama) -> None:
    first = Conversation(llm)
    second = Conversation(llm, system=SYSTEM)
    with pytest.raises(PyH2OError, match="another text"):
        said(first.say("hello", max_tokens=SHORT))
    said(second.say("hello", max_tokens=SHORT))


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

    def again(_n_tokens: int) -> None:
        for change in (lambda: said(conversation.say("x")), conversation.undo):
            with pytest.raises(PyH2OError, match="being written") as error:
                change()
            errors.append(error.value)

    conversation = Conversation(tiny_llama(path, **EVICTING), on_recompute=again)
    said(conversation.say("hello", max_tokens=200))
    said(conversation.regenerate(max_tokens=SHORT))
    assert len(errors) == 2
    assert len(conversation.turns) == 1


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------

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
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    about = json.loads(members["header.json"])
    edit(about["header"])
    members["header.json"] = json.dumps(about).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
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


# -------------------------------------------------------------------------------------------------
# Everything at once
# -------------------------------------------------------------------------------------------------


class Model:
    """What the text has to be, from what was drawn alone."""

    def __init__(self, llm: Llama) -> None:
        self.llm = llm
        self.system: str | None = None
        self.turns: list[tuple[str, list[int]]] = []

    def text(self) -> list[int]:
        parts = ChatTemplate(self.llm, self.system)
        tokens: list[int] = []
        for message, answer in self.turns:
            tokens += (parts.next_turn if tokens else parts.first_turn)(message) + answer
        return tokens


@pytest.mark.usefixtures("with_ends")
@pytest.mark.parametrize("settings", [EVICTING, ROOMY, FULL])
def test_any_sequence_of_changes(
    path: Path,
    tmp_path: Path,
    trap: Trap,
    drawn: list[list[int]],
    evaluated: list[int],
    rng: np.random.Generator,
    settings: dict[str, Any],
) -> None:
    conversation = Conversation(tiny_llama(path, **settings, n_batch=24))
    model = Model(conversation.llm)
    counted = 0
    for _ in range(120):
        if conversation.llm.n_tokens > 1500:
            conversation.clear()
            model.turns.clear()
        action = str(rng.choice(["say", "say", "say", "edit", "regenerate", "undo", "other"]))
        if action != "other" and (action == "say" or model.turns):
            message = "m" * int(rng.integers(0, 60))
            if action == "undo":
                conversation.undo()
                model.turns.pop()
            else:
                replaced = action != "say"
                message = model.turns[-1][0] if action == "regenerate" else message
                arguments = () if action == "regenerate" else (message,)
                if rng.random() < 0.4:
                    trap.countdown = int(rng.integers(1, 20))
                    trap.after = bool(rng.random() < 0.5)
                    trap.error = KeyboardInterrupt if rng.random() < 0.5 else RuntimeError
                limit = int(rng.integers(1, 20))
                leave = int(rng.integers(1, 20))
                n_drawn = len(drawn)
                failed = None
                answer = getattr(conversation, action)(*arguments, max_tokens=limit)
                try:
                    for i, _piece in enumerate(answer):
                        if i == leave:
                            answer.close()
                            break
                except (KeyboardInterrupt, RuntimeError) as error:
                    failed = type(error)
                trap.countdown = -1
                tokens = drawn[-1] if len(drawn) > n_drawn else []
                if tokens and failed is not RuntimeError:
                    if replaced:
                        model.turns.pop()
                    model.turns.append((message, tokens))
        elif rng.random() < 0.3:
            model.system = (
                str(rng.choice(["Be brief.", "Be long."])) if rng.random() < 0.7 else None
            )
            conversation.set_system(model.system)
        else:
            counted += conversation.tokens_evaluated
            conversation.save(tmp_path / "chat")
            llm = (
                conversation.llm if rng.random() < 0.7 else tiny_llama(path, **settings, n_batch=24)
            )
            conversation = Conversation.load(tmp_path / "chat", llm)
            assert conversation.tokens_evaluated == 0
        text = text_of(conversation)
        assert [turn.user for turn in conversation.turns] == [message for message, _ in model.turns]
        assert conversation.system == model.system
        if model.turns:
            assert text == model.text()
        else:
            opening = conversation._template.opening
            assert text == opening[: len(text)]
        check_positions(conversation)
    assert len(model.turns) + len(drawn) > 20
    # A batch that was computed but not recorded is counted in neither.
    assert counted + conversation.tokens_evaluated == sum(evaluated)
    if settings is EVICTING:
        return
    # Nothing was evicted, so a full cache has to agree.
    other = tiny_llama(path, **FULL)
    said(conversation.say("end", max_tokens=SHORT))
    text = [*text_of(conversation), 5]
    other.eval(text)
    conversation.llm.eval(text[conversation.llm.n_tokens :])
    np.testing.assert_allclose(next_logits(conversation.llm), next_logits(other), atol=1e-4)


def test_a_conversation_is_exported() -> None:
    assert pyh2o.Conversation is Conversation
    assert pyh2o.Turn is Turn
    assert {"Conversation", "Turn"} <= set(pyh2o.__all__)


# ---- places ----


def test_the_system_prompt_can_be_left_unpinned(path: Path) -> None:
    llm = tiny_llama(path, **EVICTING, policy="streaming:sinks=0")
    conversation = Conversation(llm, system=SYSTEM, pin_system=False)
    for _ in range(8):
        "".join(conversation.say("Where are we?", max_tokens=SHORT))
    assert llm.kv.pinned == 0
    assert llm.kv.compactions > 0
    assert int(llm.kv_rows(0)[0].min()) > len(conversation._template.opening)


@pytest.mark.parametrize("fair_turns", [False, True])
def test_fair_turns_keep_a_part_of_each_turn(path: Path, tmp_path: Path, fair_turns: bool) -> None:
    """Nothing else of a window would be left of the first turns. A session goes on as it was."""
    llm = tiny_llama(path, **EVICTING, policy="streaming:sinks=0")
    conversation = Conversation(llm, system=SYSTEM, fair_turns=fair_turns)
    for number in range(16):
        "".join(conversation.say(f"Where are we? This is question {number}.", max_tokens=SHORT))
        if number == 7:
            conversation.save(tmp_path / "chat.h2o")
            conversation = Conversation.load(tmp_path / "chat.h2o", llm)
    assert llm.kv.compactions > 2
    kept = [set(head) for layer in range(2) for head in llm.kv_rows(layer)[0].tolist()]
    has_rows = [
        all(head & set(range(turn.start, turn.end)) for head in kept) for turn in conversation.turns
    ]
    assert all(has_rows) == fair_turns
    assert has_rows[-1]
