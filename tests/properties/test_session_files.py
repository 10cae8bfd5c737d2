"""A damaged session file is refused, or the loaded session equals the saved one."""

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
from pyh2o.writing.sampling import RANDOM_SEEDS, Sampling
from rewritten_sessions import HEADER, KV, TOKENS, members_of, session_of
from tiny_chat import CHATML
from tiny_llama import tiny_llama
from tries import Tries, or_refusal, refused

AFTER = 5  # the next token


MODEL: dict[str, Any] = {"template": CHATML, "n_layer": 2}


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[Llama]:
    with tiny_llama(path, **EVICTING) as model:
        yield model


@dataclass
class Saved:
    """Two saved sessions, and the expected content after loading, of the first one at first.

    Changes of the first one copy parts of the other one, perhaps as good as all of it.
    """

    kind: type[Conversation] | type[Story]
    file: Path
    data: bytes
    other: bytes
    contents: list[tuple[list[int], list[Any], np.ndarray]]

    def load(self, data: bytes, llm: Llama) -> Any:
        """Return the loaded session, or None if it is refused and the model is unchanged."""
        self.file.write_bytes(data)
        n_before = llm.n_tokens
        loaded = or_refusal(lambda: self.kind.load(self.file, llm))
        assert loaded is not None or llm.n_tokens == n_before
        return loaded

    def check(self, loaded: Any) -> None:
        """Check that it equals the saved session, or reports that its cache state is missing."""
        found = about(loaded)
        [number] = [n for n, (_, seen, _) in enumerate(self.contents) if seen == found]
        self.check_text(loaded, number)

    def check_text(self, loaded: Any, number: int = 0) -> None:
        llm, text = loaded.llm, loaded._text
        tokens, _, logits = self.contents[number]
        assert text.tokens == tokens
        if llm.n_tokens:
            llm.eval([*tokens[llm.n_tokens :], AFTER])
            np.testing.assert_array_equal(next_logits(llm), logits)
            llm.reset()


def about(session: Any) -> list[Any]:
    if isinstance(session, Conversation):
        return [session.turns, session.system, session.sampling, session.pins]
    return [session.text(), session.held_back, session.sampling, session.finish, session.pins]


def started(kind: type[Any], llm: Llama, seed: int) -> Any:
    """Return a session of a length that depends only on the seed."""
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
    files, contents = [], []
    for seed in (1, 2):
        session = started(request.param, llm, seed)
        session.save(file)
        files.append(file.read_bytes())
        tokens, seen = list(session._text.tokens), about(session)
        assert llm.kv.compactions > 0
        llm.eval([*tokens[llm.n_tokens :], AFTER])
        contents.append((tokens, seen, next_logits(llm)))
        llm.reset()
    return Saved(request.param, file, files[1], files[0], contents[::-1])


def test_a_saved_session_is_loaded(saved: Saved, llm: Llama) -> None:
    """Otherwise the other tests would prove nothing."""
    loaded = saved.load(saved.data, llm)
    assert llm.n_tokens > 100
    saved.check(loaded)


def test_a_damaged_file_is_refused_or_loads_the_saved_session(
    saved: Saved, llm: Llama, tries: Tries
) -> None:
    def check(changes: list[Any]) -> None:
        loaded = saved.load(edited(saved.data, changes, saved.other), llm)
        if loaded is not None:
            assert llm.n_tokens > 0
            saved.check(loaded)

    tries.every(edits(len(saved.data)), check, examples=150)


@pytest.mark.parametrize("member", [TOKENS, KV])
def test_mixed_parts_of_files_are_refused_or_load_the_saved_session(
    saved: Saved, llm: Llama, tries: Tries, member: str
) -> None:
    """Each part is intact, but they do not belong together."""
    members, others = members_of(saved.data), members_of(saved.other)

    def check(changes: list[Any]) -> None:
        data = edited(members[member], changes, others[member])
        loaded = saved.load(session_of({**members, member: data}), llm)
        if loaded is not None:
            saved.check(loaded)

    tries.every(st.just([]) | edits(len(members[member])), check, examples=60)


def test_an_edited_header_keeps_the_text_or_is_refused(
    saved: Saved, llm: Llama, tries: Tries
) -> None:
    """Also if a person edited it: the text stays, and later operations are refused or work."""
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
        assert contains(now["header"], odd["header"])
        loaded = saved.kind.load(saved.file, llm)
        assert about(loaded) == before
        try:
            continues(loaded)
        except PyH2OError as error:
            refused(error)

    tries.every(oddities(), check, examples=150)


# Fields that depend on the model's path, on a refused cache state, and the archive's name. An
# invalid value counts as missing, since a session also opens without its archive.
OWN = {"model", "cached", "known", "archive"}


def contains(found: Any, header: Any) -> bool:
    """Return whether all of a header's fields were read; missing fields have defaults."""
    if isinstance(header, dict) and isinstance(found, dict):
        return all(
            name in OWN
            or (name == "seed" and value in RANDOM_SEEDS)  # replaced by a new one
            or (name in found and contains(found[name], value))
            for name, value in header.items()
        )
    if isinstance(header, list) and isinstance(found, list):
        return len(found) == len(header) and all(map(contains, found, header))
    return bool(found == header)


def continues(session: Any) -> None:
    """Apply the usual next operations."""
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
