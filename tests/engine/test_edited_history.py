"""Clients that edit what was said: the oldest messages go, notes come in above the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from many_texts import ask, llama_in, tiny_engine
from pyh2o.engine import Engine
from pyh2o.engine.engine import Terms
from pyh2o.engine.slots import MIN_SHARED
from sampled_answers import said, sampled_alone, words
from tiny_chat import CHATML, LLAMA_2, LLAMA_3, write_chat_gguf

BUDGET: dict[str, Any] = {"n_ctx": 256, "hh": 24, "recent": 24, "slack": 16, "recall": 8}


MODEL: dict[str, Any] = {"template": CHATML}


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with tiny_engine(path, texts=2, **BUDGET) as running:
        yield running


class Client:
    """Sends the system prompt and the last messages, as many as its window has."""

    def __init__(
        self, engine: Engine, *, keep: bool = True, window: int = 5, note_depth: int = 0
    ) -> None:
        self.engine, self.window, self.note_depth = engine, window, note_depth
        self.messages: list[Any] = []
        self.system = said("you are a scribe", by="system")
        self.terms = Terms(keep_dropped=keep)
        self.n_read = 0

    def ask(self, text: str, grammar: str = "root ::= [ab]+") -> dict[str, int]:
        """The tokens used by an answer; with those that were read for it."""
        self.messages.append(said(text))
        return self.again(grammar)

    def again(self, grammar: str = "root ::= [ab]+") -> dict[str, int]:
        sent = [self.system, *self.messages[-self.window :]]
        if self.note_depth:
            sent.insert(-self.note_depth, said("write in verse", by="system"))
        before = self.engine.batches.tokens
        terms = self.terms
        answer = ask(self.engine, sent, terms=terms, max_tokens=20, **sampled_alone(grammar))
        usage = answer["usage"]
        self.n_read = self.engine.batches.tokens - before - usage["completion_tokens"] + 1
        self.messages.append(said(answer["choices"][0]["message"]["content"], by="assistant"))
        return {**usage, **usage.pop("prompt_tokens_details")}


@pytest.mark.parametrize(
    ("template", "grammar"),
    [
        (CHATML, "root ::= [ab]+"),
        (LLAMA_3, "root ::= [ab]+"),
        # the system prompt is a part of the first message, whichever that is
        (LLAMA_2, 'root ::= " " [ab]+'),
    ],
    ids=["chatml", "llama 3", "llama 2"],
)
def test_a_small_window_has_a_long_memory(
    tmp_path: Path, rng: np.random.Generator, template: str, grammar: str
) -> None:
    path = write_chat_gguf(tmp_path / "tiny.gguf", template)
    with tiny_engine(path, texts=2, **BUDGET) as engine:
        client = Client(engine)
        n_text = 0
        for turn in range(60):
            used = client.ask(words(rng, 4), grammar)
            assert client.n_read == used["prompt_tokens"] - used["cached_tokens"]
            assert (used["dropped_tokens"] > 0) == (turn > 2)
            if turn:  # the newest token, and the new message
                assert client.n_read < 60
                assert used["dropped_tokens"] + used["cached_tokens"] == n_text - 1
            n_text = used["dropped_tokens"] + used["total_tokens"]
        kv = max((place.kv for place in engine.report()), key=lambda kv: kv.position)
        assert kv.position == n_text - 1 > 60 * 40
        assert kv.archived > n_text - 3 * BUDGET["recent"]  # from its beginning on


def test_without_being_asked_nothing_is_kept(engine: Engine, rng: np.random.Generator) -> None:
    client = Client(engine, keep=False)
    for turn in range(6):
        used = client.ask(words(rng, 4))
        assert used["dropped_tokens"] == 0
        if turn > 2:
            assert client.n_read > used["prompt_tokens"] // 2
    assert used["total_tokens"] - 1 in [place.kv.position for place in engine.report()]


def test_nobody_gets_at_the_text_of_one_who_has_not_asked(
    engine: Engine, rng: np.random.Generator
) -> None:
    """Whoever has the end of a chat could ask the model for its beginning."""
    client, other = Client(engine, keep=False), Client(engine)
    for _ in range(8):
        client.ask(words(rng, 4))
    other.messages = client.messages
    assert other.ask("what was first?")["dropped_tokens"] == 0


def test_an_answer_is_drawn_again_behind_all_of_the_text(
    engine: Engine, rng: np.random.Generator
) -> None:
    client = Client(engine)
    for _ in range(8):
        used = client.ask(words(rng, 4))
    del client.messages[-1]
    again = client.again()
    assert again["dropped_tokens"] == used["dropped_tokens"] > 100
    assert again["cached_tokens"] > again["prompt_tokens"] // 2


def test_another_chat_is_no_later_part(engine: Engine, rng: np.random.Generator) -> None:
    """Though it begins with words that were said in the first one, but were not answered so."""
    first = Client(engine)
    for _ in range(8):
        first.ask(words(rng, 4))
    said_there = first.messages[-4]["content"]
    other = Client(engine)
    assert other.ask(said_there)["dropped_tokens"] == 0
    assert other.ask(words(rng, 4))["dropped_tokens"] == 0
    assert first.ask("go on")["dropped_tokens"] > 0


def test_what_has_changed_is_read(engine: Engine, rng: np.random.Generator) -> None:
    """A system prompt, or the oldest message that the client still has; or is left out later."""
    client = Client(engine)
    for _ in range(8):
        client.ask(words(rng, 4))
    client.system = said("you are a clerk", by="system")
    assert client.ask("go on")["dropped_tokens"] == 0
    client.system = said("you are a scribe", by="system")
    client.messages[-client.window + 1] = said(words(rng, 4))
    assert client.ask("go on")["dropped_tokens"] == 0
    other = Client(engine, window=100)
    for _ in range(8):
        other.ask(words(rng, 4))
    del other.messages[4:8]
    assert other.ask("go on")["dropped_tokens"] == 0


def test_a_text_that_is_gone_is_not_read_for_it(path: Path, rng: np.random.Generator) -> None:
    """No request reads more than it has tokens."""
    with tiny_engine(path, texts=1, store_mib=0, **BUDGET) as engine:
        client = Client(engine)
        for _ in range(12):
            client.ask(words(rng, 4))
        with llama_in(engine) as llm:
            llm.reset()
            llm.eval([3, 4, 5])
        used = client.ask("go on")
        assert used["dropped_tokens"] == used["cached_tokens"] == 0
        assert client.n_read == used["prompt_tokens"]


def test_a_text_that_lost_its_place_comes_back(path: Path, rng: np.random.Generator) -> None:
    with tiny_engine(path, texts=1, **BUDGET) as engine:
        first, second = Client(engine), Client(engine)
        second.system = said("you are a cook", by="system")
        for turn in range(12):
            for client in (first, second):
                used = client.ask(words(rng, 4))
                assert client.n_read < 70 or turn == 0
        assert used["dropped_tokens"] > 300


def test_a_full_cache_has_its_end(path: Path, rng: np.random.Generator) -> None:
    """Then the text begins anew with what the client has."""
    with tiny_engine(path, texts=1, evict=False, n_ctx=512) as engine:
        client = Client(engine)
        dropped = [client.ask(words(rng, 4))["dropped_tokens"] for _ in range(30)]
    assert max(dropped) > 100
    assert dropped[10:].count(0) > 0


def test_a_story_of_which_the_end_is_sent_goes_on(engine: Engine, rng: np.random.Generator) -> None:
    """Behind what the client has told the model first, and cut anywhere."""
    terms = Terms(keep_dropped=True)
    memory, text, n_text = "It is winter.\n", words(rng, 20), 0
    for turn in range(12):
        prompt = memory + text[-150 - turn :]
        answer = ask(engine, prompt, terms=terms, max_tokens=40, **sampled_alone())
        text += answer["choices"][0]["text"]
        usage = answer["usage"]
        details = usage["prompt_tokens_details"]
        if turn > 3:
            assert details["dropped_tokens"] + details["cached_tokens"] == n_text - 1
        n_text = details["dropped_tokens"] + usage["total_tokens"]
    assert n_text > 400


@pytest.mark.parametrize("window", [8, 10**6])
def test_a_note_above_the_end_costs_what_is_behind_it(
    engine: Engine, rng: np.random.Generator, window: int
) -> None:
    """It moves with each turn; rows of the tokens before it were evicted since."""
    client = Client(engine, window=window, note_depth=4)
    n_read = []
    for _ in range(30):
        used = client.ask(words(rng, 4))
        n_read.append(client.n_read)
    n_message = used["total_tokens"] / min(window, 60)
    # four behind its last place, two that came since, the note, and what no copy was made for
    assert max(n_read[10:]) < (4 + 2 + 1) * n_message + 2 * MIN_SHARED
