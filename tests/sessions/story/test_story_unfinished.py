"""Passages that end with their program are in the session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pyh2o import Llama
from pyh2o.sessions import unfinished
from pyh2o.sessions.story import Story
from pyh2o.sessions.unfinished import path_beside
from pyh2o.writing.sampling import Sampling

PROMPT = "Once upon a time. And"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(unfinished, "SECONDS", 0.0)
    return tmp_path / "tale"


def begun(llm: Llama, file: Path, note: str = "") -> Story:
    """A story with a passage, as a server keeps it."""
    tale = Story(llm, PROMPT, echo=True, sampling=Sampling(seed=5), ignore_eos=True)
    tale.note = note
    "".join(tale.write(30))
    tale.notes = {"text": tale.text(), "passages": [len(PROMPT)]}
    tale.save(file)
    tale.noted_beside = file
    return tale


def killed(file: Path) -> Path:
    """What lies there at this moment."""
    copy = file.with_name("killed")
    shutil.copy(file, copy)
    shutil.copy(path_beside(file), path_beside(copy))
    return copy


def test_it_goes_on_where_it_was_cut(llm: Llama, other: Llama, file: Path) -> None:
    tale = begun(llm, file)
    first = tale.text()
    tale.notes = {**tale.notes, "passages": [len(PROMPT), len(first)]}
    passage = tale.write(20)
    new = "".join(next(passage) for _ in range(10))
    after = Story.load(killed(file), other)
    assert after.text() == after.notes["text"] == first + new
    assert (after.finish, after.notes["passages"]) == ("interrupted", [len(PROMPT), len(first)])
    rest = "".join(passage)
    assert "".join(after.write(10)) == rest  # nothing of the cache was of another text
    tale.save(file)
    assert not path_beside(file).exists()


@pytest.mark.parametrize("note", ["", "sad"])
def test_what_was_cut_before_it_is_gone(llm: Llama, other: Llama, file: Path, note: str) -> None:
    tale = begun(llm, file, note)
    first = tale.text()
    tale.cut(len(first) - 9)
    new = "".join(next(tale.write(20)) for _ in range(1))
    after = Story.load(killed(file), other)
    assert after.text() == after.notes["text"] == first[:-9] + new
    assert (after.tokens, after.told) == (tale.tokens, tale.told)
    assert "".join(after.write(5))
