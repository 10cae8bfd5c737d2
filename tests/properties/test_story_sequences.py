"""After any operations a story's text is what was output, and equals an uninterrupted story.

Tokens are evaluated one by one (`n_batch=1`), so that chunks do not affect rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyh2o import Llama
from pyh2o.errors import SettingsError
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from tiny_llama import tiny_llama
from tries import Tries, refused

LONGEST = 250
SETTINGS: dict[str, dict[str, Any]] = {
    "evicting": {"n_ctx": 256, "hh": 20, "recent": 20, "slack": 8},
    "recalling": {"n_ctx": 256, "hh": 20, "recent": 20, "slack": 8, "recall": 16},
    "full": {"n_ctx": 600, "evict": False},
}
Lengths = st.integers(1, 40)
Q4_1 = GGMLQuantizationType.Q4_1
MODEL: dict[str, Any] = {"seed": 17, "n_layer": 2, "n_ctx_train": 600, "dtype": Q4_1}


@dataclass
class Scene:
    """Two models with the same settings, and a folder."""

    llms: list[Llama]
    folder: Path


@pytest.fixture(params=SETTINGS)
def scene(path: Path, request: Any, tmp_path: Path) -> Iterator[Scene]:
    settings = {**SETTINGS[request.param], "n_batch": 1}
    with tiny_llama(path, **settings) as one, tiny_llama(path, **settings) as other:
        yield Scene([one, other], tmp_path)


class StorySequence(RuleBasedStateMachine):
    """A story and its expected text."""

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        self.scene, self.file = scene, scene.folder / "story.h2o"

    @initialize(
        prompt=st.sampled_from(["Once", "Once upon a time there was " * 4, "é☺ "]),
        echo=st.booleans(),
        until=st.sampled_from([(), ("e",), ("the end", "\n")]),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 0.8, 3.0]),
        loop_guard=st.booleans(),
        ignore_eos=st.booleans(),
    )
    def start(self, prompt: str, seed: int, temperature: float, **settings: Any) -> None:
        sampling = Sampling(seed=seed, temperature=temperature)
        self.prompt, self.settings = prompt, {**settings, "sampling": sampling}
        self.tale = Story(self.scene.llms[0], prompt, **self.settings)
        self.given = ""
        self.passages: list[int | None] = []  # tokens of each; None after a cut
        self.is_whole = True  # nothing changed since the start

    @property
    def can_resume(self) -> bool:
        return len(self.tale.tokens) < LONGEST

    @precondition(lambda self: self.can_resume)
    @rule(length=Lengths)
    def write(self, length: int) -> None:
        before = self.tale.written
        self.given += "".join(self.tale.write(length))
        n_new = self.tale.written - before
        assert n_new <= length
        assert self.tale.finish != "length" or n_new == length
        self.passages.append(length)

    @precondition(lambda self: self.can_resume)
    @rule(length=Lengths, stop=st.integers(1, 20))
    def stop(self, length: int, stop: int) -> None:
        """Between two tokens."""
        writing = self.tale.write(length)
        for n, text in enumerate(writing, 1):
            self.given += text
            if n == stop:
                writing.close()
                break
        self.is_whole = False

    @rule(here=st.booleans())
    def save_and_load(self, here: bool) -> None:
        tale = self.tale
        before = (tale.tokens, tale.text(), tale.held_back, tale.finish, tale.loops, tale.pins)
        tale.save(self.file)
        if not here:
            self.scene.llms.reverse()
        tale = self.tale = Story.load(self.file, self.scene.llms[0])
        after = (tale.tokens, tale.text(), tale.held_back, tale.finish, tale.loops, tale.pins)
        assert after == before
        assert tale.llm.archive_trouble == ""

    @rule()
    def use_another_story(self) -> None:
        """Another story uses the model meanwhile."""
        "".join(Story(self.tale.llm, "Another").write(5))
        self.is_whole = self.is_whole and not self.tale.llm.model.recalls

    @precondition(lambda self: self.given)
    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        n_characters = max(1, round(share * len(self.given)))
        self.tale.cut(n_characters)
        self.given = self.given[:n_characters]
        self.is_whole = False

    @precondition(lambda self: self.given)
    @rule(share=st.floats(0, 1), more=st.sampled_from(["", " and so", "é☺"]))
    def edit(self, share: float, more: str) -> None:
        text = self.given[: round(share * len(self.given))] + more
        if not text:
            return
        self.tale.edit(text)
        self.given = text
        self.is_whole = False

    @rule(start=st.floats(0, 1), length=st.integers(1, 12))
    def pin(self, start: float, length: int) -> None:
        n_tokens = len(self.tale.tokens)
        first = int(start * (n_tokens - 1))
        before = self.tale.pins
        try:
            self.tale.pin(first, min(n_tokens, first + length))
        except SettingsError as error:
            refused(error)
            assert self.tale.pins == before
        self.is_whole = False

    @precondition(lambda self: self.can_resume)
    @rule(length=Lengths)
    def a_saved_file_continues_the_same(self, length: int) -> None:
        """Like the saved story if it had the model then; otherwise it is read again."""
        self.tale.save(self.file)
        loaded = Story.load(self.file, self.scene.llms[1])
        assert (loaded.tokens, loaded.text()) == (self.tale.tokens, self.tale.text())
        if not loaded.llm.n_tokens:
            return
        text = "".join(loaded.write(length))
        self.write(length)
        assert self.given.endswith(text)
        assert loaded.tokens == self.tale.tokens
        assert loaded.text() == self.given

    @precondition(lambda self: self.is_whole and self.passages)
    @rule()
    def equals_an_uninterrupted_story(self) -> None:
        """Generated by an unused model and never saved."""
        tale = Story(self.scene.llms[1], self.prompt, **self.settings)
        text = "".join("".join(tale.write(length)) for length in self.passages)
        assert tale.tokens == self.tale.tokens
        assert text == self.given

    @invariant()
    def the_text_equals_the_output(self) -> None:
        if not hasattr(self, "tale"):
            return
        tale = self.tale
        assert tale.text() == self.given or not self.passages
        if tale.text() != self.given:  # a prompt that is not output yet
            assert not self.given

    @invariant()
    def the_cache_stays_within_its_limits(self) -> None:
        kv = self.scene.llms[0].kv
        assert kv.position == self.scene.llms[0].n_tokens
        assert kv.used <= kv.capacity


def test_any_sequence_of_operations_keeps_the_invariants(scene: Scene, tries: Tries) -> None:
    tries.sequences(lambda: StorySequence(scene), examples=8)
