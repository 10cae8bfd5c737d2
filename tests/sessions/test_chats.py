"""The chats of a user: titles, and locks between programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyh2o.errors import SessionError, SessionOpenError
from pyh2o.sessions.chats import MAX_TITLE, locked, open_chats, title_of
from pyh2o.sessions.database import Database
from pyh2o.sessions.messages import Message


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "chats"))
    return tmp_path / "chats"


def test_a_text_is_open_once(folder: Path) -> None:
    with open_chats() as database, Database(folder / "chats.db") as other:
        text, free = (database.create("conversation", title) for title in ("one", "two"))
        database.write(text, [Message("hello", "in progress")])
        with locked(database, text):
            with (
                pytest.raises(SessionOpenError, match="session one is open in another chat"),
                locked(other, text),
            ):
                pass
            with locked(other, free):
                pass
            assert other.read(text).messages[0].finish == "interrupted"
        with locked(other, text):
            pass
    assert folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PYH2O_CHATS", str(tmp_path / "file"))
    with pytest.raises(SessionError, match=r"cannot write to .*file .*PYH2O_CHATS"):
        open_chats()


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("  What is\n this? ", "What is this?"),
        (f"<picture:{'a' * 64}>\nwho is that?", "who is that?"),
        ("word " * 30, "word word word word word word word word word"),
        ("鯨" * 100, "鯨" * MAX_TITLE),
        (" \n", ""),
    ],
)
def test_titles_are_the_first_words(text: str, title: str) -> None:
    assert title_of(text) == title
