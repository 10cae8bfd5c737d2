"""After any operations a conversation's text is its messages, and a saved file restores it.

Tokens are evaluated one by one (`n_batch=1`), so that chunks do not affect rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chat_turns import ChatTurns
from conversations import Trap, check_positions, next_logits, said, without_kv
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError, SettingsError
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML
from tiny_llama import tiny_llama
from tries import Tries, refused

LONGEST = 400
SETTINGS: dict[str, dict[str, Any]] = {
    "evicting": {"n_ctx": 200, "hh": 40, "recent": 30, "slack": 20},
    "recalling": {"n_ctx": 200, "hh": 40, "recent": 30, "slack": 20, "recall": 20},
    "roomy": {"n_ctx": 1000, "hh": 500, "recent": 500},
    "full": {"n_ctx": 1000, "evict": False},
}
# With this capacity nothing is evicted from a text read at once.
WHOLE = ("roomy", "full")

Messages = st.lists(
    st.sampled_from(["why", "m", " and so ", "<|im_end|>", "<s>", "\n", "é☺"]), max_size=6
).map("".join)
Limits = st.integers(1, 12)
# How an answer ends early: after `n` chunks of text, or by an error after `n` evaluations.
Leaving = st.none() | st.tuples(
    st.sampled_from(["close", "interrupt", "fail"]), st.integers(1, 15), st.booleans()
)


@dataclass
class Scene:
    """Two models with the same settings, and a folder."""

    llms: list[Llama]
    trap: Trap
    folder: Path
    is_whole: bool


MODEL: dict[str, Any] = {"template": CHATML, "n_layer": 2, "dtype": GGMLQuantizationType.Q4_1}


@pytest.fixture(params=SETTINGS)
def scene(
    path: Path, request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    trap = Trap()
    decode = trap.around(llama_cpp._internals.LlamaContext.decode)
    monkeypatch.setattr(llama_cpp._internals.LlamaContext, "decode", decode)
    settings = {**SETTINGS[request.param], "n_batch": 1}
    with tiny_llama(path, **settings) as one, tiny_llama(path, **settings) as other:
        yield Scene([one, other], trap, tmp_path, request.param in WHOLE)


class ConversationSequence(RuleBasedStateMachine):
    """A conversation and its expected text."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene
        self.trap, self.file = scene.trap, scene.folder / "talk.h2o"
        self.trap.countdown = -1
        self.start()

    def start(self) -> None:
        self.system: str | None = None
        self.turns: list[tuple[str, list[int]]] = []
        self.kept: dict[int, Any] = {}  # previous answers to the last message
        self.talk = Conversation(self.scene.llms[0], sampling=Sampling(seed=1, temperature=2.0))
        self.is_exact = True

    def text(self, turns: list[tuple[str, list[int]]]) -> list[int]:
        """Return the expected tokens of messages and answers."""
        parts = ChatTurns(self.talk.llm.model, self.system)
        tokens: list[int] = []
        for message, answer in turns:
            tokens += (parts.next_turn if tokens else parts.first_turn)(message) + answer
        return tokens

    def last_attempt(self) -> dict[int, Any]:
        """Return the attempt number and the tokens of the last answer."""
        turn = self.talk.turns[-1]
        tokens = self.talk.tokens[turn.answer_start : turn.end]
        return {turn.attempt: (turn.answer, turn.finish, tokens)}

    def read_answer(
        self, answer: Any, message: str, n_before: int, leaving: Any, kept: dict[int, Any]
    ) -> None:
        """Read an answer to a message after `n` turns, and keep other attempts."""
        way, count, after = leaving or (None, -1, False)
        trap = self.trap
        if way in ("interrupt", "fail"):
            trap.countdown, trap.after = count, after
            trap.error = KeyboardInterrupt if way == "interrupt" else RuntimeError
        before, failed, pieces = self.talk.turns, None, []
        try:
            for piece in answer:
                pieces.append(piece)
                if way == "close" and len(pieces) == count:
                    answer.close()
                    break
        except (KeyboardInterrupt, RuntimeError) as error:
            if isinstance(error, PyH2OError):
                raise
            failed = type(error)
        trap.countdown = -1
        self.is_exact = self.is_exact and failed is None and n_before == len(self.turns)
        # the same message can get the same answer
        if self.talk.turns == before and (failed is not None or not "".join(pieces)):
            return
        self.kept = kept
        assert failed is not RuntimeError
        turn = self.talk.turns[-1]
        assert turn.user == message
        assert turn.answer.endswith("".join(pieces))
        tokens = self.talk.tokens[turn.answer_start : turn.end]
        assert tokens
        self.turns = [*self.turns[:n_before], (message, tokens)]

    @rule(message=Messages, limit=Limits, leaving=Leaving)
    def say(self, message: str, limit: int, leaving: Any) -> None:
        if len(self.talk.tokens) > LONGEST:
            self.talk.clear()
            self.turns, self.kept, self.is_exact = [], {}, False
        answer = self.talk.say(message, max_tokens=limit)
        self.read_answer(answer, message, len(self.turns), leaving, {})

    @precondition(lambda self: self.turns)
    @rule(limit=Limits, leaving=Leaving)
    def regenerate(self, limit: int, leaving: Any) -> None:
        answer = self.talk.regenerate(max_tokens=limit)
        kept = {**self.kept, **self.last_attempt()}
        self.read_answer(answer, self.turns[-1][0], len(self.turns) - 1, leaving, kept)

    @precondition(lambda self: self.turns)
    @rule(message=Messages, limit=Limits, leaving=Leaving)
    def edit(self, message: str, limit: int, leaving: Any) -> None:
        answer = self.talk.edit(message, max_tokens=limit)
        self.read_answer(answer, message, len(self.turns) - 1, leaving, {})

    @precondition(lambda self: self.turns)
    @rule(limit=Limits, leaving=Leaving)
    def resume(self, limit: int, leaving: Any) -> None:
        """The answer keeps its start, unless the model had ended it."""
        message, tokens = self.turns[-1]
        if self.talk.turns[-1].finish == "stop":
            with pytest.raises(PyH2OError, match="the model has ended its answer"):
                next(self.talk.resume())
            return
        answer = self.talk.resume(max_tokens=limit)
        self.read_answer(answer, message, len(self.turns) - 1, leaving, self.kept)
        # a stop text can start in the text shown so far
        n_same = len(tokens) - 1
        assert self.turns[-1][1][:n_same] == tokens[:n_same]

    @precondition(lambda self: self.turns)
    @rule()
    def undo(self) -> None:
        self.talk.undo()
        self.turns, self.kept = self.turns[:-1], {}
        self.is_exact = False

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 100))
    def choose(self, which: int) -> None:
        """Restore a replaced answer, and keep the current one in its place."""
        attempt = sorted(self.kept)[which % len(self.kept)]
        kept = {**self.kept, **self.last_attempt()}
        self.talk.choose(attempt)
        self.turns[-1] = (self.turns[-1][0], kept.pop(attempt)[2])
        self.kept, self.is_exact = kept, False

    @rule(system=st.sampled_from([None, "Be brief.", "Be long and kind."]))
    def set_system(self, system: str | None) -> None:
        try:
            self.talk.set_system(system)
        except SettingsError as error:
            refused(error)
        else:
            self.system = system

    @precondition(lambda self: self.talk.tokens)
    @rule(start=st.floats(0, 1), length=st.integers(1, 20), pinned=st.booleans())
    def pin(self, start: float, length: int, pinned: bool) -> None:
        n_tokens = len(self.talk.tokens)
        first = int(start * (n_tokens - 1))
        end = min(n_tokens, first + length)
        before = self.talk.pins
        try:
            (self.talk.pin if pinned else self.talk.unpin)(first, end)
        except SettingsError as error:
            refused(error)
            assert self.talk.pins == before
            return
        now = {position for a, b in self.talk.pins for position in range(a, b)}
        was = {position for a, b in before for position in range(a, b)}
        span = set(range(first, end))
        assert now == (was | span if pinned else was - span)
        self.is_exact = False

    @rule(here=st.booleans(), again=st.booleans())
    def save_and_load(self, here: bool, again: bool) -> None:
        pins = self.talk.pins
        self.talk.save(self.file)
        if again:
            without_kv(self.file)
        if not here:
            self.scene.llms.reverse()
        self.talk = Conversation.load(self.file, self.scene.llms[0])
        self.is_exact = self.is_exact and not again
        assert self.talk.pins == pins
        assert self.talk.llm.archive_trouble == ""

    @rule()
    def use_another_conversation(self) -> None:
        """Another conversation takes the model: this one is restored from snapshots."""
        said(Conversation(self.talk.llm).say("who", max_tokens=3))
        self.talk.set_thinking(self.talk.thinking)
        self.is_exact = False

    @rule(message=Messages, limit=Limits)
    def a_saved_file_continues_the_same(self, message: str, limit: int) -> None:
        """Bit for bit like the saved conversation."""
        self.talk.save(self.file)
        mine, other = self.talk.llm, self.scene.llms[1]
        loaded = Conversation.load(self.file, other)
        text = said(loaded.say(message, max_tokens=limit))
        assert said(self.talk.say(message, max_tokens=limit)) == text
        assert loaded.tokens == self.talk.tokens
        assert loaded.turns == self.talk.turns
        if len(self.talk.turns) > len(self.turns):
            turn = self.talk.turns[-1]
            self.turns.append((message, self.talk.tokens[turn.answer_start : turn.end]))
            self.kept = {}
            np.testing.assert_array_equal(next_logits(mine), next_logits(other))
            for layer in range(mine.n_layer if mine.evicting else 0):
                np.testing.assert_equal(mine.kv_rows(layer), other.kv_rows(layer))

    @invariant()
    def the_text_equals_the_messages(self) -> None:
        talk = self.talk
        assert [turn.user for turn in talk.turns] == [message for message, _ in self.turns]
        assert talk.system == self.system
        text, expected = talk.tokens, self.text(self.turns)
        if self.turns:
            assert text == expected
        else:
            assert text == talk._template.opening[: len(text)]
        check_positions(talk)

    @invariant()
    def every_answer_is_kept(self) -> None:
        talk = self.talk
        found = {
            each.attempt: (each.answer, each.finish, list(each.tokens))
            for each in talk._dialogue.kept
        }
        assert found == self.kept
        last = self.last_attempt() if self.turns else {}
        assert [each.attempt for each in talk.answers] == sorted({**found, **last})

    @invariant()
    def the_cache_stays_within_its_limits(self) -> None:
        kv, llm = self.talk.llm.kv, self.talk.llm
        assert kv.position == llm.n_tokens <= len(self.talk.tokens)
        assert llm.tokens.tolist() == self.talk.tokens[: llm.n_tokens]
        assert kv.used <= kv.capacity

    @precondition(lambda self: self.turns)
    @rule()
    def compare(self) -> None:
        """Compare with a model that read the same text, unless an inexact tail was removed."""
        llm, anew = self.talk.llm, self.scene.llms[1]
        if llm.model.recalls or not (self.is_exact or self.scene.is_whole):
            return
        n_turns = len(self.turns)
        self.say("so", 1, None)
        # the model may have generated nothing, which removes the message
        if len(self.turns) <= n_turns or not (self.is_exact or self.scene.is_whole):
            return
        anew.reset()
        anew.text.cache.pin(self.talk.n_pinned)
        anew.eval(self.talk.tokens[: llm.n_tokens])
        np.testing.assert_array_equal(next_logits(llm), next_logits(anew))


def test_any_sequence_of_operations_keeps_the_invariants(scene: Scene, tries: Tries) -> None:
    tries.sequences(lambda: ConversationSequence(scene), examples=4)
