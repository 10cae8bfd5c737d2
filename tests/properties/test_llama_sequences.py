"""After any operations a `Llama` continues like a new one that has read the same tokens.

Tokens are evaluated one by one (`n_batch=1`), so that chunks do not affect rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from conversations import next_logits
from mutations import Edit, edited, edits
from pyh2o import Llama
from pyh2o.errors import EvictedError, SettingsError, StateError
from tiny_llama import tiny_llama
from tries import Tries, refused

N_VOCAB = 384
LONGEST = 500
SMALL = {"n_ctx": 128, "hh": 12, "recent": 12, "slack": 8, "pinned": 2, "n_batch": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "h2o": {"policy": "h2o"},
    "h2o-far": {"policy": "h2o-far"},
    "snap": {"policy": "snap:queries=8"},
    "recall": {"recall": 8, "recall_type": "f16"},
    "full": {"evict": False, "n_ctx": 2 * LONGEST},
}

Tokens = st.lists(st.integers(3, N_VOCAB - 1), min_size=1, max_size=40)
Q4_1 = GGMLQuantizationType.Q4_1
MODEL: dict[str, Any] = {"seed": 7, "n_layer": 2, "n_ctx_train": 200, "dtype": Q4_1}


@dataclass(frozen=True)
class Done:
    """Operations on a text, which a new model can repeat.

    Attributes:
        exact: whether the scores are known; removing a tail leaves its attention in them.
        compactions: number of compactions before which the rows do not depend on that trace.
        whole: whether all recent rows are present; after a removed tail some can be missing.
    """

    steps: tuple[tuple[str, Any], ...] = ()
    exact: bool = True
    compactions: int | None = None
    whole: bool = True

    @property
    def tokens(self) -> list[int]:
        return [token for kind, what in self.steps if kind == "eval" for token in what]

    def then(self, kind: str, what: Any) -> Done:
        return replace(self, steps=(*self.steps, (kind, what)))

    def has(self, kind: str) -> bool:
        return any(kind == each for each, _ in self.steps)

    def first(self, n_tokens: int) -> Done:
        """Return the first tokens and all other operations."""
        steps, n_left = [], n_tokens
        for kind, what in self.steps:
            if kind == "eval":
                what, n_left = what[:n_left], max(0, n_left - len(what))
            if kind == "drop":
                what = [span for span in what if span[1] <= n_tokens]
            steps.append((kind, what))
        return replace(self, steps=tuple(steps))


@dataclass
class Models:
    """The model under test, and one that repeats its operations."""

    used: Llama
    anew: Llama
    settings: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module", params=SETTINGS)
def models(path: Path, request: Any) -> Iterator[Models]:
    settings = {**SMALL, **SETTINGS[request.param]}
    if "evict" in settings:
        settings["pinned"] = 0
        settings["rope_freq_scale"] = 0.1
    with tiny_llama(path, **settings) as used, tiny_llama(path, **settings) as anew:
        yield Models(used, anew, settings)


class LlamaSequence(RuleBasedStateMachine):
    """Operations on a model and its expected text."""

    states: Bundle[Any] = Bundle("states")

    def __init__(self, models: Models) -> None:
        super().__init__()
        self.llm, self.anew = models.used, models.anew
        self.llm.reset()
        self.done = Done()

    @property
    def is_exact(self) -> bool:
        done = self.done
        return done.exact and done.compactions in (None, self.llm.kv.compactions)

    def shortened(self, n_tokens: int) -> None:
        """The text has lost its tail, which the scores still contain."""
        llm, done = self.llm, self.done
        nothing_evicted = llm.kv.used == llm.n_tokens
        exact = self.is_exact and nothing_evicted
        compactions = llm.kv.compactions if llm.evicting else None
        whole = done.whole and nothing_evicted
        self.done = replace(done.first(n_tokens), exact=exact, compactions=compactions, whole=whole)

    @rule(tokens=Tokens)
    def evaluate(self, tokens: list[int]) -> None:
        if len(self.done.tokens) < LONGEST:
            self.llm.eval(tokens)
            self.done = self.done.then("eval", tokens)

    @rule()
    def reset(self) -> None:
        self.llm.reset()
        self.done = Done()

    @rule(share=st.floats(0, 1), tokens=Tokens, n=st.integers(1, 20))
    def generate(self, share: float, tokens: list[int], n: int) -> None:
        """Use a prompt that starts with all or a part of the text."""
        if len(self.done.tokens) >= LONGEST:
            return
        text = self.llm.text.tokens[self.llm.text.kept_positions].tolist()
        n_kept = round(share * len(text))
        prompt = text[:n_kept] + tokens
        is_going_on = prompt[: len(text)] == text
        drawn: list[int] = []
        for token in self.llm.generate(prompt, temp=0.0):
            drawn.append(token)
            if len(drawn) == n:
                break
        now = self.llm.text
        assert now.tokens[now.kept_positions].tolist() == prompt + drawn[:-1]
        if not is_going_on and (now.dropped_spans or self.done.has("spans")):
            self.done = Done((("eval", now.tokens.tolist()),), exact=False)
        elif is_going_on:
            self.done = self.done.then("eval", prompt[len(text) :] + drawn[:-1])
        else:
            exact = not self.done.has("pin") and self.llm.text.position_limit > 0
            self.done = Done((("eval", prompt + drawn[:-1]),), exact=exact)

    @precondition(lambda self: self.done.tokens)
    @rule(back=st.integers(0, 60))
    def remove_tail(self, back: int) -> None:
        n_tokens = max(0, len(self.done.tokens) - back)
        can = self.llm.text.can_remove_tail(n_tokens)
        assert self.llm.text.remove_tail(n_tokens) == can
        if can and back:
            self.shortened(n_tokens)

    @precondition(lambda self: self.done.tokens)
    @rule(back=st.integers(1, 60), tokens=Tokens)
    def rewind(self, back: int, tokens: list[int]) -> None:
        """As programs for llama_cpp do."""
        n_tokens = max(1, len(self.done.tokens) - back)
        can = self.llm.text.can_remove_tail(n_tokens)
        self.llm.n_tokens = n_tokens
        try:
            self.llm.eval(tokens)
        except EvictedError as error:
            refused(error)
            assert not can
            self.reset()
            return
        self.shortened(n_tokens)
        self.done = self.done.then("eval", tokens)

    @rule(n=st.integers(0, 16))
    def pin(self, n: int) -> None:
        try:
            self.llm.text.cache.pin(n)
        except SettingsError as error:
            refused(error)
        else:
            self.done = self.done.then("pin", n)

    @rule(borders=st.lists(st.integers(0, 200), max_size=6))
    def pin_spans(self, borders: list[int]) -> None:
        spans = list(zip(borders[::2], borders[1::2], strict=False))
        try:
            self.llm.pin_spans(spans)
        except SettingsError as error:
            refused(error)
        else:
            self.done = self.done.then("spans", spans)

    @precondition(lambda self: self.llm.evicting and self.done.tokens)
    @rule(start=st.integers(0, 200), n=st.integers(1, 60))
    def drop_spans(self, start: int, n: int) -> None:
        spans = [(start, start + n)]
        try:
            self.llm.text.drop_spans(spans)
        except SettingsError as error:
            refused(error)
        else:
            self.done = self.done.then("drop", spans)

    @rule(target=states, whole=st.booleans())
    def save(self, whole: bool) -> Any:
        state = self.llm.save_state() if whole else self.llm.kv_state()
        return state, self.done, self.is_exact

    @rule(saved=states)
    def load(self, saved: Any) -> None:
        state, done, exact = saved
        if isinstance(state, bytes):
            self.llm.load_kv_state(state, done.tokens)
        else:
            self.llm.load_state(state)
        if self.llm.evicting:
            compactions = None if done.compactions is None else self.llm.kv.compactions
            done = replace(done, compactions=compactions)
        self.done = replace(done, exact=exact)

    @rule(saved=states, changes=edits(4000), n_more=st.integers(-1, 1))
    def load_damaged(self, saved: Any, changes: list[Edit], n_more: int) -> None:
        """A damaged state is refused and empties the text, or the damage had no effect."""
        state, done, _ = saved
        if not isinstance(state, bytes) or not self.llm.evicting:
            return
        tokens = [*done.tokens, 5][: max(0, len(done.tokens) + n_more)]
        try:
            self.llm.load_kv_state(edited(state, changes), tokens)
        except StateError as error:
            refused(error)
            self.done = Done()
        else:
            assert tokens == done.tokens
            self.load(saved)

    @invariant()
    def the_text_equals_the_input(self) -> None:
        llm, tokens = self.llm, self.done.tokens
        assert llm.input_ids[: llm.n_tokens].tolist() == tokens
        assert llm.kv.position == llm.n_tokens == len(tokens)

    @invariant()
    def the_cache_stays_within_its_limits(self) -> None:
        llm, kv = self.llm, self.llm.kv
        if not llm.evicting:
            return
        n_tokens = llm.n_tokens
        assert kv.used <= kv.capacity
        assert 0 <= kv.found_share < 1
        assert all(0 <= span.start < span.end <= llm.n_tokens for span in llm.recalled())
        n_recent = kv.recent if self.done.whole else 1
        dropped = {at for a, b in llm.text.dropped_spans for at in range(a, b)}
        assert len(dropped) == kv.dropped
        recent = set(range(max(0, n_tokens - n_recent), n_tokens)) - dropped
        for layer in range(llm.text.n_layer):
            positions, scores = llm.kv_rows(layer)
            assert np.isfinite(scores).all()
            assert (scores >= 0).all()
            assert (np.diff(positions) > 0).all()
            for head in positions.tolist():
                assert len(head) == kv.used
                assert recent <= set(head) <= set(range(n_tokens))

    @rule(token=st.integers(3, N_VOCAB - 1))
    def compare(self, token: int) -> None:
        """The model and a new one give the same logits and keep the same rows."""
        if not self.is_exact or len(self.done.tokens) > LONGEST:
            return
        self.llm.eval([token])
        self.done = self.done.then("eval", [token])
        exact = self.is_exact  # the token may have exceeded the limit
        anew = self.anew
        anew.reset()
        for kind, what in self.done.steps:
            do = {"eval": anew.eval, "pin": anew.text.cache.pin, "spans": anew.pin_spans}
            (do | {"drop": anew.text.drop_spans})[kind](what)
        if exact:
            np.testing.assert_array_equal(next_logits(self.llm), next_logits(anew))


def test_any_sequence_of_operations_keeps_the_invariants(models: Models, tries: Tries) -> None:
    tries.sequences(lambda: LlamaSequence(models), examples=12)


def test_sequences_reach_compactions_and_rebases_or_retrieval(models: Models) -> None:
    llm = models.used
    llm.reset()
    llm.eval([7] * 300)
    kv = llm.kv
    assert not llm.evicting or kv.compactions > 20
    assert llm.text.model.recalls == (kv.found_share > 0)
    assert llama_cpp.llama_model_n_ctx_train(llm.model) < 300
