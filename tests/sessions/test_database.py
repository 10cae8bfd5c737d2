"""The database of texts: branches, search, copies, and what survives a killed program."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyh2o.errors import SessionError
from pyh2o.sessions.database import Database
from pyh2o.sessions.messages import CONVERSATION, STORY, Message, packed, unpacked

HASH = "a" * 64
FIRST = Message("Hello there", "Hi", "stop", 0, 2, packed([5, 6, 7]), {"inserted": ""})
SECOND = Message("And now?", "We go on", "stop", 0, 1, packed([8, -3, 9]))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database(tmp_path / "chats.db") as database:
        yield database


@pytest.fixture
def text(database: Database) -> int:
    text = database.create(CONVERSATION, "A talk")
    database.write(text, [FIRST, SECOND], settings={"system": None})
    return text


def count(database: Database, table: str = "messages") -> int:
    with sqlite3.connect(database.path) as db:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_texts_are_read_as_they_were_written(database: Database, text: int, tmp_path: Path) -> None:
    other = database.create(STORY, "A tale")
    with Database(tmp_path / "chats.db") as again:
        contents = again.read(text)
        assert [info.id for info in again.texts()] == [other, text]
    assert contents.messages == [FIRST, SECOND]
    assert unpacked(contents.messages[1].tokens) == [8, -3, 9]
    info = contents.info
    assert (info.kind, info.title, info.settings) == (CONVERSATION, "A talk", {"system": None})
    assert (info.n_messages, info.n_tokens) == (2, 6)
    assert info.created <= info.changed
    assert tmp_path.joinpath("chats.db").stat().st_mode & 0o077 == 0


def test_nothing_is_deleted_when_a_text_changes(database: Database, text: int) -> None:
    second = replace(SECOND, answer="We stop", attempt=1, tokens=packed([8, 4]))
    database.write(text, [FIRST, second], [SECOND])  # regenerated
    assert database.read(text).replaced == [SECOND]
    database.write(text, [FIRST, SECOND], [second])  # the other answer chosen
    assert database.read(text).messages == [FIRST, SECOND]
    assert count(database) == 3
    edited = replace(SECOND, user="And then?")
    database.write(text, [FIRST, edited])
    assert database.read(text).replaced == []
    database.write(text, [FIRST])  # undone
    database.write(text, [])  # cleared
    assert database.read(text).messages == []
    assert count(database) == 4
    database.write(text, [FIRST, SECOND])
    assert count(database) == 4


def test_a_text_that_is_written_without_a_change_keeps_its_time(
    database: Database, text: int
) -> None:
    before = database.info(text)
    with Database(database.path) as other:
        for _ in range(2):
            other.write(text, [FIRST, SECOND], settings=before.settings)
        assert other.info(text) == before
        other.write(text, [FIRST, SECOND], settings={"system": "x"})
        assert other.info(text).changed > before.changed


def test_an_answer_in_progress_is_one_row(database: Database, text: int) -> None:
    for answer in ("", "It ", "It ends END"):
        tokens = packed([1, *answer.encode()])
        third = Message("How?", answer, None, 0, 1, tokens)
        database.write(text, [FIRST, SECOND, third])
    final = replace(third, answer="It ends", finish="length", tokens=packed([1, *b"It ends"]))
    database.write(text, [FIRST, SECOND, final])
    longer = replace(final, answer="It ends?", finish="stop", tokens=packed([1, *b"It ends?"]))
    database.write(text, [FIRST, SECOND, longer])
    assert database.read(text).messages == [FIRST, SECOND, longer]
    assert count(database) == 3


def test_a_branch_stays_when_the_answer_before_it_is_continued(
    database: Database, text: int
) -> None:
    longer = replace(FIRST, answer="Hi!", tokens=packed([5, 6, 7, 8]))
    database.write(text, [longer])
    assert count(database) == 3
    database.write(text, [FIRST, SECOND])
    assert count(database) == 3


def test_another_chat_template_changes_the_rows_in_place(database: Database, text: int) -> None:
    first = replace(FIRST, n_before=1, tokens=packed([4, 7]))
    database.write(text, [first, SECOND])
    assert database.read(text).messages == [first, SECOND]
    assert count(database) == 2


def test_words_are_found_in_messages_and_titles(database: Database, text: int) -> None:
    other = database.create(CONVERSATION, "Weiße Wale")
    database.write(other, [Message("鯨は どこ?", f"{'far ' * 20}In the SEA they live", "stop")])

    def found(words: str) -> list[tuple[int, str]]:
        return [(hit.text.id, hit.snippet) for hit in database.search(words)]

    assert found("go") == [(text, "And now? We go on")]
    assert found("hello hi") == [(text, "Hello there Hi")]
    assert found("hello on") == []
    assert [each for each, _ in found("WEISSE wale")] == [other]
    assert [each for each, _ in found("鯨は")] == [other]
    assert [each for each, _ in found('"sea')] == []
    ((_, snippet),) = found("the sea")
    assert snippet.startswith("...")
    assert "SEA they live" in snippet
    database.write(other, [Message("鯨は どこ?", "On land", None)])
    database.remove(text)
    assert found("go") == found("hello") == []


def test_words_after_a_nul_character_are_found(database: Database, text: int) -> None:
    database.write(text, [replace(FIRST, user='before\0 "quoted" C:\\ab')])
    for word in ("before", '"quoted"', "c:\\ab"):
        assert [hit.text.id for hit in database.search(word)] == [text], word
    database.write(text, [replace(FIRST, answer="a longer\0 answer", finish=None)])
    database.write(text, [replace(FIRST, answer="another\0 one")])
    assert database.search("longer") == []
    assert len(database.search("one")) == 1
    database.remove(text)
    database._db.execute("INSERT INTO found (found) VALUES ('integrity-check')")
    assert database.search("one") == []


def test_titles_are_unique(database: Database, text: int) -> None:
    assert database.info(database.create(STORY, "A talk")).title == "A talk (2)"
    assert database.info(database.create(STORY, "A talk")).title == "A talk (3)"
    database.rename(text, "A talk")
    with pytest.raises(SessionError, match=r"there is a session 'A talk \(2\)'"):
        database.rename(text, "A talk (2)")
    database.rename(text, "Any/text: ok?")
    assert database.find("Any/text: ok?") == text


def test_removed_texts_leave_nothing_and_others_keep_their_pictures(
    database: Database, text: int
) -> None:
    pictures = {HASH: b"shared", "b" * 64: b"own"}
    seen = [Message(f"Look: <picture:{key}>", "Nice", "stop") for key in pictures]
    database.write(text, seen, pictures=pictures)
    other = database.create(CONVERSATION, "Other")
    database.write(other, seen[:1])
    assert database.pictures(text) == pictures
    long = [Message(str(n), "", "stop") for n in range(1200)]  # deeper than SQLite's triggers
    database.write(text, [*seen, *long])
    database.kv_file(text).parent.mkdir()
    database.kv_file(text).write_bytes(b"cache")
    database.remove(text)
    assert not database.kv_file(text).exists()
    assert (count(database), count(database, "pictures")) == (1, 1)
    assert database.pictures(other) == {HASH: b"shared"}
    with pytest.raises(SessionError, match="it was removed"):
        database.write(text, [FIRST])


def test_copies_have_all_branches_and_pictures(
    database: Database, text: int, tmp_path: Path
) -> None:
    second = replace(SECOND, user=f"<picture:{HASH}>", attempt=1)
    database.write(
        text, [FIRST, second], [replace(second, answer="x", attempt=0)], pictures={HASH: b"p"}
    )
    with Database(tmp_path / "talk.h2o", single=True) as single:
        copied = database.copy(text, single)
        again = single.copy(copied, database)
        assert single.kv_file(copied) == tmp_path / "talk.h2o.kv"
        assert single.pictures(copied) == {HASH: b"p"}
    assert [*tmp_path.glob("talk*")] == [tmp_path / "talk.h2o"]
    before, after = database.read(text), database.read(again)
    assert after == replace(before, info=replace(before.info, id=again, title="A talk (2)"))
    assert count(database) == 8


def test_what_was_written_survives_a_killed_program(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pyh2o.sessions.database import Database
from pyh2o.sessions.messages import Message
database = Database({str(tmp_path / "chats.db")!r})
text = database.create("conversation", "Killed")
database.write(text, [Message("Hello", "In progr", None)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    with Database(tmp_path / "chats.db") as database:
        text = database.texts()[0].id
        database.settle(text)
        assert database.read(text).messages == [Message("Hello", "In progr", "interrupted")]


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="there is no session file"):
        Database(tmp_path / "missing", read_only=True)
    (tmp_path / "text").write_text("just a text\n" * 100)
    sqlite3.connect(tmp_path / "foreign").execute("CREATE TABLE x (y)").connection.close()
    for name in ("text", "foreign"):
        before = (tmp_path / name).read_bytes()
        for read_only in (True, False):
            with pytest.raises(SessionError, match="is not a session file"):
                Database(tmp_path / name, single=True, read_only=read_only)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(SessionError, match="cannot use the session file"):
        Database(tmp_path)
    Database(tmp_path / "new", single=True).close()
    with sqlite3.connect(tmp_path / "new") as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(SessionError, match="format version 2, and this pyh2o reads 1"):
        Database(tmp_path / "new")
