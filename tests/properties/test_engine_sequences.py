"""Each text of an engine gets the same tokens as if it were alone.

Tokens are evaluated one by one (`n_batch=1`), with weights that ggml multiplies token by token. So
no bit of a text depends on its chunks or on other texts.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from gguf import GGMLQuantizationType
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from many_texts import at_once, llama_in, tiny_engine
from pyh2o import Llama
from pyh2o.engine import Engine
from tiny_llama import tiny_llama
from tries import Tries

MODEL: dict[str, Any] = {"seed": 3, "n_layer": 2, "dtype": GGMLQuantizationType.Q4_1}


pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="ggml's products of other processors"
)

N_PLACES = 2
N_OWNERS = 3
SETTINGS = {"n_ctx": 128, "hh": 16, "recent": 12, "slack": 8, "n_batch": 1}
# Number of snapshots without a slot.
STORES: dict[str, dict[str, Any]] = {
    "all": {},
    "few": {"store_mib": 1},
    "none": {"store_mib": 0},
}

Tokens = st.lists(st.integers(3, 383), min_size=1, max_size=40)
# Which earlier text a prompt starts with, how much of it, what follows, and how many
# tokens are sampled.
Prompts = st.tuples(st.integers(0, 9), st.floats(0, 1), Tokens, st.integers(1, 12))


@dataclass
class Scene:
    """An engine, and the same model for a single text."""

    engine: Engine
    alone: Llama


@pytest.fixture(params=STORES)
def scene(path: Path, request: Any, tmp_path: Path) -> Iterator[Scene]:
    store = STORES[request.param]
    with (
        tiny_engine(path, texts=N_PLACES, **SETTINGS, **store) as engine,
        tiny_llama(path, **SETTINGS) as alone,
    ):
        yield Scene(engine, alone)


def complete(llm: Llama, prompt: list[int], n: int) -> list[int]:
    """Return the model's most probable tokens after a prompt."""
    drawn: list[int] = []
    for token in llm.generate(prompt, temp=0.0):
        drawn.append(token)
        if len(drawn) == n:
            break
    assert llm.kv.position == llm.n_tokens == len(prompt) + n - 1
    assert llm.kv.used <= llm.kv.capacity
    return drawn


class EngineSequence(RuleBasedStateMachine):
    """Texts of an engine and their expected tokens."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.engine, self.alone = scene.engine, scene.alone
        self.texts: list[list[int]] = [[]]
        self.owned: list[list[int]] = [[] for _ in range(N_OWNERS)]
        self.owners = [Mock(spec=["leave"]) for _ in range(N_OWNERS)]

    def prompt_of(self, drawn: tuple[int, float, list[int], int]) -> tuple[list[int], int]:
        which, share, more, n = drawn
        text = self.texts[which % len(self.texts)]
        return text[: round(share * len(text))] + more, n

    def check(self, prompt: list[int], drawn: list[int]) -> None:
        """Compare with a model that has read nothing else."""
        self.alone.reset()
        assert complete(self.alone, prompt, len(drawn)) == drawn
        if len(prompt) < 200:
            self.texts.append(prompt + drawn)

    @rule(drawn=st.lists(Prompts, min_size=1, max_size=4))
    def complete_concurrently(self, drawn: list[Any]) -> None:
        """Complete one text or several at the same time; texts wait if no slot is free."""
        prompts = [self.prompt_of(each) for each in drawn]

        def work(prompt: list[int], n: int) -> list[int]:
            with llama_in(self.engine, prompt, n_new=n) as llm:
                return complete(llm, prompt, n)

        works = [lambda prompt=prompt, n=n: work(prompt, n) for prompt, n in prompts]
        for (prompt, _), tokens in zip(prompts, at_once(works), strict=True):
            self.check(prompt, tokens)

    @rule(drawn=Prompts)
    def fail(self, drawn: Any) -> None:
        """A text that ends with an error leaves no trace."""
        prompt, n = self.prompt_of(drawn)
        with suppress(ZeroDivisionError), llama_in(self.engine, prompt, n_new=n) as llm:
            complete(llm, prompt, n)
            raise ZeroDivisionError

    @rule(which=st.integers(0, N_OWNERS - 1), tokens=Tokens)
    def resume(self, which: int, tokens: list[int]) -> None:
        """An owner's text continues in its slot or is read again."""
        text = self.owned[which] if len(self.owned[which]) < 200 else []
        with llama_in(self.engine, owner=self.owners[which]) as llm:
            if llm.slot.keeps_text and text:
                assert llm.input_ids[: llm.n_tokens].tolist() == text
            else:
                llm.reset()
                llm.eval(text)
            llm.eval(tokens)
            llm.slot.keeps_text = True
            likeliest = llm.sample(temp=0.0)
        text = self.owned[which] = text + tokens
        self.alone.reset()
        self.alone.eval(text)
        assert likeliest == self.alone.sample(temp=0.0)

    @rule(which=st.integers(0, N_OWNERS - 1))
    def release_slots(self, which: int) -> None:
        self.engine.move_out(self.owners[which])

    @invariant()
    def all_slots_are_free(self) -> None:
        assert (self.engine.n_running, self.engine.n_waiting) == (0, 0)
        for place in self.engine.report():
            assert place.kv.used <= place.kv.capacity


def test_any_sequence_of_texts_equals_texts_alone(scene: Scene, tries: Tries) -> None:
    tries.sequences(lambda: EngineSequence(scene), examples=6)
