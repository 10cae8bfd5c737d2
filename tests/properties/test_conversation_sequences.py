"""Whatever is done with a conversation, its text is what was said, and a file of it is the same.

All is evaluated token by token (`n_batch=1`): then no piece is rounded otherwise than another.
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

from conversations import Trap, check_positions, next_logits, said
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError, SettingsError
from pyh2o.writing.chat_template import ChatTemplate
from pyh2o.writing.sampling import Sampling
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama
from tries import Tries, refused

LONGEST = 400
SETTINGS: dict[str, dict[str, Any]] = {
    "evicting": {"n_ctx": 200, "hh": 40, "recent": 30, "slack": 20},
    "recalling": {"n_ctx": 200, "hh": 40, "recent": 30, "slack": 20, "recall": 20},
    "roomy": {"n_ctx": 1000, "hh": 500, "recent": 500},
    "full": {"n_ctx": 1000, "evict": False},
}
# What all that is read together is as when nothing is evicted.
WHOLE = ("roomy", "full")

Messages = st.lists(
    st.sampled_from(["why", "m", " and so ", "<|im_end|>", "<s>", "\n", "é☺"]), max_size=6
).map("".join)
Limits = st.integers(1, 12)
# How an answer is left: after so many pieces, or by an error in so many evaluations.
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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf",
        CHATML,
        n_layer=2,
        dtype=GGMLQuantizationType.Q4_1,
    )


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
    """What is said, and what the text has to be."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene = scene
        self.trap, self.file = scene.trap, scene.folder / "talk.h2o"
        self.trap.countdown = -1
        self.begin()

    def begin(self) -> None:
        self.system: str | None = None
        self.turns: list[tuple[str, list[int]]] = []
        self.kept: dict[int, Any] = {}  # what other attempts have said to the last message
        self.talk = Conversation(self.scene.llms[0], sampling=Sampling(seed=1, temperature=2.0))
        self.is_exact = True

    def text(self, turns: list[tuple[str, list[int]]]) -> list[int]:
        """The tokens of messages and answers."""
        parts = ChatTemplate(self.talk.llm.model, self.system)
        tokens: list[int] = []
        for message, answer in turns:
            tokens += (parts.next_turn if tokens else parts.first_turn)(message) + answer
        return tokens

    # ---------------------------------------------------------------------------------------------
    # Answers
    # ---------------------------------------------------------------------------------------------

    def said_last(self) -> dict[int, Any]:
        """The attempt of the last answer, and what it is."""
        turn = self.talk.turns[-1]
        tokens = self.talk.tokens[turn.answer_start : turn.end]
        return {turn.attempt: (turn.answer, turn.finish, tokens)}

    def hear(
        self, answer: Any, message: str, n_before: int, leaving: Any, kept: dict[int, Any]
    ) -> None:
        """Read an answer to a message that comes behind so many turns, and keeps others."""
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
        # the same message may be given the same answer
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
        self.hear(answer, message, len(self.turns), leaving, {})

    @precondition(lambda self: self.turns)
    @rule(limit=Limits, leaving=Leaving)
    def regenerate(self, limit: int, leaving: Any) -> None:
        answer = self.talk.regenerate(max_tokens=limit)
        kept = {**self.kept, **self.said_last()}
        self.hear(answer, self.turns[-1][0], len(self.turns) - 1, leaving, kept)

    @precondition(lambda self: self.turns)
    @rule(message=Messages, limit=Limits, leaving=Leaving)
    def edit(self, message: str, limit: int, leaving: Any) -> None:
        answer = self.talk.edit(message, max_tokens=limit)
        self.hear(answer, message, len(self.turns) - 1, leaving, {})

    @precondition(lambda self: self.turns)
    @rule(limit=Limits, leaving=Leaving)
    def go_on(self, limit: int, leaving: Any) -> None:
        """The answer begins as it did, unless the model had ended it."""
        message, tokens = self.turns[-1]
        if self.talk.turns[-1].finish == "stop":
            with pytest.raises(PyH2OError, match="the model has ended its answer"):
                next(self.talk.go_on())
            return
        answer = self.talk.go_on(max_tokens=limit)
        self.hear(answer, message, len(self.turns) - 1, leaving, self.kept)
        # a stop text may have begun in what was shown
        n_same = len(tokens) - 1
        assert self.turns[-1][1][:n_same] == tokens[:n_same]

    # ---------------------------------------------------------------------------------------------
    # Changes
    # ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.turns)
    @rule()
    def undo(self) -> None:
        self.talk.undo()
        self.turns, self.kept = self.turns[:-1], {}
        self.is_exact = False

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 100))
    def choose(self, which: int) -> None:
        """An answer that was replaced comes back, and the one in its place is kept in turn."""
        attempt = sorted(self.kept)[which % len(self.kept)]
        kept = {**self.kept, **self.said_last()}
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

    @rule(here=st.booleans(), portable=st.booleans(), again=st.booleans())
    def save_and_load(self, here: bool, portable: bool, again: bool) -> None:
        pins = self.talk.pins
        self.talk.save(self.file, portable=portable)
        if not here:
            self.scene.llms.reverse()
        self.talk = Conversation.load(self.file, self.scene.llms[0], reread=again)
        self.is_exact = self.is_exact and not again
        # of a text that is read again the system prompt has its own pins
        start = (self.talk.turns[0].start if self.talk.turns else len(self.talk.tokens)) * again
        assert self.talk.pins == tuple((max(a, start), b) for a, b in pins if b > start)
        assert self.talk.llm.archive_trouble == ""

    @rule()
    def another_one(self) -> None:
        """Takes the model: this one has to be loaded, and nothing of it is lost."""
        self.talk.save(self.file)
        said(Conversation(self.talk.llm).say("who", max_tokens=3))
        for step in (self.talk.undo, self.talk.clear, lambda: said(self.talk.say("me"))):
            with pytest.raises(PyH2OError, match="used for another text") as error:
                step()
            refused(error.value)
        self.talk = Conversation.load(self.file, self.talk.llm)

    @rule(message=Messages, limit=Limits, portable=st.booleans())
    def a_file_goes_on_the_same(self, message: str, limit: int, portable: bool) -> None:
        """As the conversation that was saved, bit for bit."""
        self.talk.save(self.file, portable=portable)
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

    # ---------------------------------------------------------------------------------------------
    # What holds
    # ---------------------------------------------------------------------------------------------

    @invariant()
    def the_text_is_what_was_said(self) -> None:
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
        last = self.said_last() if self.turns else {}
        assert [each.attempt for each in talk.answers] == sorted({**found, **last})

    @invariant()
    def the_cache_holds_what_it_may(self) -> None:
        kv, llm = self.talk.llm.kv, self.talk.llm
        assert kv.position == llm.n_tokens <= len(self.talk.tokens)
        assert llm.tokens.tolist() == self.talk.tokens[: llm.n_tokens]
        assert kv.used <= kv.capacity

    @precondition(lambda self: self.turns)
    @rule()
    def compare(self) -> None:
        """With a model that has read the same text, if nothing was taken back or all is there."""
        llm, anew = self.talk.llm, self.scene.llms[1]
        if llm.model.recalls or not (self.is_exact or self.scene.is_whole):
            return
        n_turns = len(self.turns)
        self.say("so", 1, None)
        # the model may have said nothing, and the message was taken back
        if len(self.turns) <= n_turns or not (self.is_exact or self.scene.is_whole):
            return
        anew.reset()
        anew.text.cache.pin(self.talk.n_pinned)
        anew.eval(self.talk.tokens[: llm.n_tokens])
        np.testing.assert_array_equal(next_logits(llm), next_logits(anew))


def test_any_sequence(scene: Scene, tries: Tries) -> None:
    tries.sequences(lambda: ConversationSequence(scene), examples=4)
