"""Texts that break off what they read, beside others that go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breaking_off import Countdown, StopError
from many_texts import at_once, llama_in, tiny_engine
from pyh2o.cache import aborting
from pyh2o.core.batcher import MIN_ABORTABLE
from pyh2o.engine import Engine
from tiny_llama import random_tokens, tiny_llama

N_VOCAB = 384
SLACK = 20
BUDGET = {"hh": 14, "recent": 9, "slack": SLACK, "n_ctx": 200, "logits_all": True}
WIDE = {**BUDGET, "slack": 80}


@pytest.fixture(autouse=True)
def _asked_at_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborting, "INTERVAL", 0)


MODEL: dict[str, Any] = {"seed": 11, "n_layer": 6, "head_size": 64}


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with tiny_engine(path, texts=3, **BUDGET) as engine:
        yield engine


@pytest.fixture
def dividing(path: Path) -> Iterator[Engine]:
    """An engine in which a text reads little at once while another is written."""
    with tiny_engine(path, texts=2, reading=MIN_ABORTABLE, **WIDE) as engine:
        yield engine


def test_what_was_read_beside_others_stays(
    dividing: Engine, path: Path, rng: np.random.Generator
) -> None:
    """A batch that others divide is broken off in one of its pieces."""
    engine = dividing
    tokens, more = random_tokens(rng, WIDE["slack"]), random_tokens(rng, 40)
    parts: list[int] = []
    writes, ends = threading.Event(), threading.Event()

    def write() -> list[int]:
        written: list[int] = []
        with llama_in(engine) as llm:
            llm.reset()
            for token in llm.generate(more[:5], temp=0.0):
                written.append(token)
                if len(written) == 2:
                    writes.set()
                if ends.is_set():
                    return written
        return written

    def read() -> np.ndarray:
        writes.wait(60)
        try:
            with llama_in(engine) as llm:
                llm.reset()
                for node in range(1, 200, 3):
                    llm.text.while_reading = Countdown(node)
                    try:
                        llm.eval(tokens[llm.n_tokens :])
                    except StopError:
                        parts.append(llm.n_tokens)
                    if llm.n_tokens == len(tokens):
                        break
                llm.text.while_reading = None
                llm.eval(more)
                return llm.scores[: llm.n_tokens].copy()
        finally:
            ends.set()

    written, scores = at_once([write, read])
    assert any(0 < n < len(tokens) for n in parts), parts
    alone = tiny_llama(path, **WIDE)
    alone.eval(tokens)
    alone.eval(more)
    np.testing.assert_array_equal(alone.scores[: alone.n_tokens], scores)
    other = tiny_llama(path, **WIDE)
    expected = other.generate(more[:5], temp=0.0)
    assert [next(expected) for _ in written] == written


def test_no_token_is_drawn_from_logits_that_are_gone(
    engine: Engine, rng: np.random.Generator
) -> None:
    tokens = random_tokens(rng, 10)
    drawn = []
    for breaks in (False, True):
        with llama_in(engine) as llm:
            llm.reset()
            llm.eval(tokens)
            if breaks:
                llm.text.while_reading = Countdown(50)
                with pytest.raises(StopError):
                    llm.eval(random_tokens(rng, MIN_ABORTABLE))
            llm.text.while_reading = None
            drawn.append(next(llm.generate(tokens, temp=0.0)))
    assert drawn[0] == drawn[1]


def test_nobody_is_asked_for_the_next_text(engine: Engine, rng: np.random.Generator) -> None:
    with llama_in(engine) as llm:
        llm.text.while_reading = Countdown(1)
    with llama_in(engine) as llm:
        llm.eval(random_tokens(rng, SLACK))
