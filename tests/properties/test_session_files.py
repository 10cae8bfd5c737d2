"""Session files made wrong in any way are refused, or what is loaded is what was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from conversations import EVICTING, next_logits, said
from mutations import edited, edits, json_bytes, made_odd, oddities
from pyh2o import Conversation, Llama
from pyh2o.errors import PyH2OError
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from rewritten_sessions import HEADER, KV, TOKENS, members_of, session_of
from tiny_chat import CHATML, write_chat_gguf
from tiny_llama import tiny_llama
from tries import Tries, or_refusal, refused

AFTER = 5  # a token that comes next


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", CHATML, n_layer=2)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, **EVICTING) as model:
        yield model


@dataclass
class Saved:
    """A session that was saved, and what it has to be when it is loaded."""

    kind: type[Conversation] | type[Story]
    file: Path
    data: bytes
    other: bytes
    tokens: list[int]
    about: list[Any]
    logits: np.ndarray

    def load(self, data: bytes, llm: Llama) -> Any:
        """The session in other data; None if that is refused, and the model is as it was then."""
        self.file.write_bytes(data)
        n_before = llm.n_tokens
        loaded = or_refusal(lambda: self.kind.load(self.file, llm))
        assert loaded is not None or llm.n_tokens == n_before
        return loaded

    def check(self, loaded: Any) -> None:
        """It is what was saved; or else its state is not there, and it says so."""
        assert about(loaded) == self.about
        self.check_text(loaded)

    def check_text(self, loaded: Any) -> None:
        llm, text = loaded.llm, loaded._text
        assert text.tokens == self.tokens
        if llm.n_tokens:
            llm.eval([*self.tokens[llm.n_tokens :], AFTER])
            np.testing.assert_array_equal(next_logits(llm), self.logits)
            llm.reset()


def about(session: Any) -> list[Any]:
    if isinstance(session, Conversation):
        return [session.turns, session.system, session.sampling, session.pins]
    return [session.text(), session.held_back, session.sampling, session.finish, session.pins]


def begun(kind: type[Any], llm: Llama, seed: int) -> Any:
    """A session of some length; of every seed it is as long."""
    if kind is Conversation:
        talk = Conversation(llm, sampling=Sampling(seed=seed, temperature=5.0, top_k=0))
        for length in (20, 60, 90):
            said(talk.say("m" * length, max_tokens=25))
        talk.pin(70, 75)
        return talk
    story = Story(llm, "Once upon a time", sampling=Sampling(seed=seed), ignore_eos=True)
    said(story.write(200))
    story.pin(30, 33)
    return story


@pytest.fixture(scope="module", params=[Conversation, Story], ids=["conversation", "story"])
def saved(request: Any, llm: Llama, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    file = tmp_path_factory.mktemp("saved") / "a.h2o"
    begun(request.param, llm, 1).save(file)
    other = file.read_bytes()
    session = begun(request.param, llm, 2)
    session.save(file)
    tokens, seen = list(session._text.tokens), about(session)
    assert llm.kv.compactions > 0
    llm.eval([*tokens[llm.n_tokens :], AFTER])
    logits = next_logits(llm)
    return Saved(request.param, file, file.read_bytes(), other, tokens, seen, logits)


def test_what_is_saved_is_loaded(saved: Saved, llm: Llama) -> None:
    """Or else the other tests would tell nothing."""
    loaded = saved.load(saved.data, llm)
    assert llm.n_tokens > 100
    saved.check(loaded)


def test_damaged_files(saved: Saved, llm: Llama, tries: Tries) -> None:
    def check(changes: list[Any]) -> None:
        loaded = saved.load(edited(saved.data, changes, saved.other), llm)
        if loaded is not None:
            assert llm.n_tokens > 0
            saved.check(loaded)

    tries.every(edits(len(saved.data)), check, examples=150)


@pytest.mark.parametrize("member", [TOKENS, KV])
def test_changed_members(saved: Saved, llm: Llama, tries: Tries, member: str) -> None:
    """Each part is whole, but they do not belong together."""
    members, others = members_of(saved.data), members_of(saved.other)

    def check(changes: list[Any]) -> None:
        data = edited(members[member], changes, others[member])
        loaded = saved.load(session_of({**members, member: data}), llm)
        if loaded is not None:
            saved.check(loaded)

    tries.every(st.just([]) | edits(len(members[member])), check, examples=60)


def test_changed_headers(saved: Saved, llm: Llama, tries: Tries) -> None:
    """Somebody may edit them: the text stays, and what comes next is refused or works."""
    members = members_of(saved.data)
    header = json.loads(members[HEADER])

    def check(changes: list[Any]) -> None:
        odd = made_odd(header, changes)
        loaded = saved.load(session_of({**members, HEADER: json_bytes(odd)}), llm)
        if loaded is None:
            return
        saved.check_text(loaded)
        loaded = saved.kind.load(saved.file, llm)
        before = about(loaded)
        loaded.save(saved.file)
        now = json.loads(members_of(saved.file.read_bytes())[HEADER])
        assert says(now["header"], odd["header"])
        loaded = saved.kind.load(saved.file, llm)
        assert about(loaded) == before
        try:
            goes_on(loaded)
        except PyH2OError as error:
            refused(error)

    tries.every(oddities(), check, examples=150)


# What the place of the model and a refused state of the cache change, and the name of an archive:
# what cannot be one is none, since a session opens without its archive, too.
OWN = {"model", "cached", "known", "archive"}


def says(found: Any, header: Any) -> bool:
    """Whether all that a header says was found; what is missing in it has a default."""
    if isinstance(header, dict) and isinstance(found, dict):
        return all(
            name in OWN or (name in found and says(found[name], value))
            for name, value in header.items()
        )
    if isinstance(header, list) and isinstance(found, list):
        return len(found) == len(header) and all(map(says, found, header))
    return bool(found == header)


def goes_on(session: Any) -> None:
    """What people do next."""
    if isinstance(session, Conversation):
        said(session.say("why", max_tokens=2))
        said(session.regenerate(max_tokens=2))
        session.undo()
        if session.turns:
            said(session.edit("so", max_tokens=2))
    else:
        said(session.write(3))
        session.cut(max(1, len(session.text()) - 5))
        said(session.write(2))
