"""The text in a model's cache: what is there, what is to be read, and whose the model is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.errors import StateError
from pyh2o.writing.cached_text import CachedText
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

RECENT = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=3)


@pytest.fixture
def llm(path: Path) -> Iterator[Llama]:
    with closing(tiny_llama(path, n_ctx=400, hh=20, recent=RECENT, slack=8)) as llm:
        yield llm


def begun(llm: Llama, tokens: list[int]) -> CachedText:
    text = CachedText(llm)
    text.begin(tokens)
    return text


def read(text: CachedText) -> None:
    text.llm.eval(text.unread)
    text.look()


def check(text: CachedText) -> None:
    """What is in the cache begins the text, and the rest is unread."""
    llm = text.llm
    assert text.tokens == llm.tokens.tolist() + text.unread
    assert text.is_there()


def test_any_sequence_of_changes_keeps_text_and_cache_together(
    llm: Llama, rng: np.random.Generator
) -> None:
    """Against the plainest record: a list of tokens."""
    text, tokens = begun(llm, [1]), [1]
    for _ in range(300):
        kind = rng.integers(4)
        if kind == 0:
            more = rng.integers(3, 300, rng.integers(1, 20)).tolist()
            text.tokens += more
            tokens += more
        elif kind == 1 and text.unread:
            read(text)
        elif kind == 2:
            size = int(rng.integers(max(1, len(tokens) - 30), len(tokens) + 1))
            text.truncate(size)
            del tokens[size:]
        else:
            start = int(rng.integers(max(1, len(tokens) - 10), len(tokens) + 1))
            dropped = text.tokens[start:]
            text.truncate(start)
            text.restore(start, dropped, text.pins, text.forgotten)
        check(text)
        assert text.tokens == tokens


def test_rows_that_are_gone_are_read_again(llm: Llama) -> None:
    text = begun(llm, list(range(3, 203)))
    read(text)
    text.truncate(199)
    assert llm.n_tokens == 199
    text.truncate(100)  # evicted by now
    assert (llm.n_tokens, len(text.unread)) == (0, 100)
    read(text)
    assert llm.n_tokens == 100


def test_pins_come_back_with_an_emptied_cache(llm: Llama) -> None:
    text = CachedText(llm)
    text.begin(list(range(3, 203)), n_pinned=5)
    for _ in range(2):
        assert llm.kv.pinned == 5
        read(text)
        assert set(range(5)) <= set(llm.kv_rows(0)[0][0].tolist())
        text.recover(0)


def test_a_model_used_for_something_else_is_noticed(llm: Llama) -> None:
    text = begun(llm, [1, 2, 3])
    read(text)
    llm.eval([4])
    assert not text.is_there()
    llm.reset()
    llm.eval([1, 2, 5])
    assert not text.is_there()
    text.reclaim()
    read(text)
    check(text)


class Owner:
    def __init__(self, llm: Llama) -> None:
        self.lost = 0
        self.text = CachedText(llm, on_taken=self.lose)

    def lose(self) -> None:
        self.lost += 1


def test_an_owner_that_is_gone_is_not_told(llm: Llama) -> None:
    owner = Owner(llm)
    owner.text.begin([1])
    gone = weakref.ref(owner)
    gc.disable()
    try:
        del owner
        assert gone() is None  # at once: a model's memory goes with its last reader
    finally:
        gc.enable()
    begun(llm, [1])


def test_a_state_that_does_not_match_is_refused(llm: Llama) -> None:
    tokens = [1, 2, 3, 4]
    text = begun(llm, tokens)
    read(text)
    state = llm.kv_state()
    text.load([*tokens, 5], tokens, state)
    assert text.unread == [5]
    text.load([1, 2, 6], tokens, state)
    assert text.unread == [6]
    for wrong, n_cached in ((state, 3), (b"", 4), (state[:-1], 4)):
        with pytest.raises(StateError):
            text.load([*tokens, 5], tokens[:n_cached], wrong)
        assert llm.n_tokens == 0
