"""Passages in progress are in the database, whenever the program ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyh2o import Llama
from pyh2o.sessions import text_session
from pyh2o.sessions.database import Database
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling

PROMPT = "Once upon a time. And"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(text_session, "SECONDS", 0.0)
    with Database(tmp_path / "chats.db") as database:
        yield database


def begun(llm: Llama, database: Database, note: str = "") -> Story:
    """Return a story with a passage."""
    tale = Story(llm, PROMPT, echo=True, sampling=Sampling(seed=5), ignore_eos=True)
    tale.note = note
    "".join(tale.write(30))
    tale.keep_in(database, "tale")
    return tale


def killed(database: Database, llm: Llama) -> Story:
    """Return the story that another program finds at this moment."""
    with Database(database.path) as other:
        (info,) = other.texts()
        other.settle(info.id)
        tale = Story.open(other, info.id, llm)
        tale.place = None
        return tale


def test_it_goes_on_where_it_was_cut(llm: Llama, other: Llama, database: Database) -> None:
    tale = begun(llm, database)
    first = tale.text()
    passage = tale.write(20)
    new = "".join(next(passage) for _ in range(10))
    after = killed(database, other)
    assert (after.text(), after.finish) == (first + new, "interrupted")
    assert [each.text for each in after.passages] == [first.removeprefix(PROMPT), new]
    rest = "".join(passage)
    assert "".join(after.write(10)) == rest  # nothing of the cache was of another text
    tale.store()
    assert killed(database, other).finish == "length"


@pytest.mark.parametrize("note", ["", "sad"])
def test_what_was_cut_before_it_is_gone(
    llm: Llama, other: Llama, database: Database, note: str
) -> None:
    tale = begun(llm, database, note)
    first = tale.text()
    tale.cut(len(first) - 9)
    new = next(tale.write(20))
    after = killed(database, other)
    assert after.text() == first[:-9] + new
    assert (after.tokens, after.told) == (tale.tokens, tale.told)
    assert "".join(after.write(5))
