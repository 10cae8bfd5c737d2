"""Conversations and stories in a SQLite database.

The messages of a text are a tree: a replaced answer, an edited message and what `undo` or `clear`
removes stay as branches, and only the head of the text moves. Rows are deleted only with the text.
Everything that was typed or sampled is here; the KV cache is a separate file (kv_file.py) that can
be rebuilt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from ..errors import SessionError
from ..writing.finish import FINISH_INTERRUPTED
from .messages import (
    FIELDS,
    INFO,
    Contents,
    Found,
    Message,
    TextInfo,
    info_from,
    message_from,
    values_of,
)
from .query import Query
from .schema import SCHEMA, statements

_APPLICATION = int.from_bytes(b"h2oc", "big")
_VERSION = 1
_BUSY_SECONDS = 30.0


class Database(contextlib.AbstractContextManager["Database"]):
    """A database of texts, which several threads and processes may use.

    Args:
        path: the file; it is created if it does not exist.
        single: whether it is a session file with one text. Such a file has no second file for
            SQLite's journal, so it can be copied.
        read_only: whether it must exist, and is not changed.

    Raises:
        SessionError: the file cannot be used.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, single: bool = False, read_only: bool = False
    ) -> None:
        self.path = Path(path)
        self._single = single
        self._lock = threading.RLock()
        # the current paths of texts that were written: rows and messages
        self._paths: dict[int, list[tuple[int, Message]]] = {}
        if read_only and not self.path.exists():
            raise SessionError(f"there is no session file {path}: check the name")
        with self._access():
            if not read_only:  # readable only by the user, and so are SQLite's other files
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                # also to read: an interrupted change is rolled back first
                f"{self.path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            with self._access():
                self._prepare(read_only)
        except BaseException:
            self.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        self._db.execute("PRAGMA foreign_keys = ON")
        # With NORMAL, a power cut would lose the commits since the last checkpoint of the journal.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA fullfsync = ON")
        if not read_only:
            if not self._single:
                self._db.execute("PRAGMA journal_mode = WAL")
            with self.change():
                if not self._one("SELECT count(*) FROM sqlite_schema"):
                    for statement in statements(SCHEMA):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
                    self._db.execute(f"PRAGMA user_version = {_VERSION}")
        if self._one("PRAGMA application_id") != _APPLICATION:
            raise self._foreign()
        version = self._one("PRAGMA user_version")
        if version != _VERSION:
            raise SessionError(
                f"{self.path} has format version {version}, and this pyh2o reads {_VERSION}: use "
                "the pyh2o that wrote it"
            )

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------
    # Texts
    # ---------------------------------------------------------------------------------------------

    def create(self, kind: str, title: str) -> int:
        """Add an empty text, and return its id; a number is added to a title that is taken."""
        with self.change():
            unused, number = title, 1
            while self.find(unused) is not None:
                number += 1
                unused = f"{title} ({number})"
            now = time.time()
            added = self._db.execute(
                "INSERT INTO texts (kind, title, created, changed) VALUES (?, ?, ?, ?)",
                (kind, unused, now, now),
            )
            assert added.lastrowid is not None
            return added.lastrowid

    def add(self, contents: Contents) -> int:
        """Add a text that was read elsewhere, and return its id."""
        with self.change():
            info = contents.info
            text = self.create(info.kind, info.title)
            path, pictures = contents.messages, contents.pictures
            self.write(text, path, contents.replaced, info.settings, pictures)
            self._db.execute(
                "UPDATE texts SET created = ?, changed = ? WHERE id = ?",
                (info.created, info.changed, text),
            )
        return text

    def texts(self) -> list[TextInfo]:
        """Return all texts, the most recently changed first."""
        with self._access():
            rows = self._db.execute(f"SELECT {INFO} FROM texts ORDER BY changed DESC, id DESC")
            return [info_from(row) for row in rows]

    def info(self, text: int) -> TextInfo:
        """Return a text without its messages; a SessionError if it was removed."""
        with self._access():
            row = self._db.execute(f"SELECT {INFO} FROM texts WHERE id = ?", (text,)).fetchone()
        if row is None:
            raise SessionError(f"the session is no longer in {self.path}: it was removed")
        return info_from(row)

    def find(self, title: str) -> int | None:
        """Return the id of the text with this title."""
        found: int | None = self._one("SELECT id FROM texts WHERE title = ?", title)
        return found

    def start_of(self, text: int, n_characters: int) -> str:
        """Return the first characters of a text."""
        start = self._one(
            "SELECT substr(CASE user WHEN '' THEN answer ELSE user END, 1, ?) FROM messages "
            "WHERE text = ? AND user || answer <> '' ORDER BY id",
            n_characters,
            text,
        )
        return start or ""

    def rename(self, text: int, title: str) -> None:
        """Change a title; a SessionError if another text has it."""
        if self.find(title) not in (None, text):
            raise SessionError(f"there is a session {title!r}: give another name")
        with self.change():
            self._db.execute("UPDATE texts SET title = ? WHERE id = ?", (title, text))

    def remove(self, text: int) -> None:
        """Delete a text with all its branches, its pictures and its KV cache."""
        with self.change():
            self._paths.pop(text, None)
            self._db.execute("DELETE FROM texts WHERE id = ?", (text,))
            self._db.execute(
                "DELETE FROM pictures WHERE NOT EXISTS "
                "(SELECT 1 FROM messages WHERE instr(user, hash))"
            )
        for file in (self.kv_file(text), self.lock_file(text)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)

    def copy(
        self, text: int, other: Database, title: str | None = None, *, cache: bool = True
    ) -> int:
        """Copy a text with all its branches; return the id of the copy.

        Args:
            text: the text.
            other: the database of the copy, which may be this one.
            title: title of the copy; None for the same. A number is added if it is taken.
            cache: whether to copy the KV cache.
        """
        info = self.info(text)
        with other.change():
            new = other.create(info.kind, title or info.title)
            ids: dict[int | None, int | None] = {None: None}
            for row, parent, created, *values in self._db.execute(
                f"SELECT id, parent, created, {FIELDS} FROM messages WHERE text = ? ORDER BY id",
                (text,),
            ).fetchall():
                ids[row] = other._insert(new, ids[parent], created, values)
            settings, head, replaced = self._db.execute(
                "SELECT settings, head, replaced FROM texts WHERE id = ?", (text,)
            ).fetchone()
            kept = json.dumps([ids[each] for each in json.loads(replaced)])
            other._db.execute(
                "UPDATE texts SET settings = ?, head = ?, replaced = ?, n_messages = ?, "
                "n_tokens = ?, created = ?, changed = ? WHERE id = ?",
                (settings, ids[head], kept, *astuple(info)[-2:], info.created, info.changed, new),
            )
            other._add_pictures(self.pictures(text))
        with contextlib.suppress(OSError):  # it can be rebuilt
            if not cache:
                return new
            other.kv_file(new).parent.mkdir(mode=0o700, exist_ok=True)
            shutil.copy(self.kv_file(text), other.kv_file(new))
        return new

    def search(self, words: str) -> list[Found]:
        """Return messages that contain all of these words, and texts whose title does.

        The most recently changed texts are first. Branches are searched too.
        """
        query = Query(words)
        if not query.words:
            return []
        where = "id IN (SELECT rowid FROM found WHERE found MATCH ?)" if query.indexed else "TRUE"
        hits: dict[int, list[tuple[int | None, str]]] = {}
        with self._access():
            rows = self._db.execute(
                f"SELECT text, id, user || '\n' || answer FROM messages WHERE {where} ORDER BY id",
                (query.indexed,) if query.indexed else (),
            )
            for text, message, content in rows:
                if query.matches(content):
                    hits.setdefault(text, []).append((message, query.snippet(content)))
        return [
            Found(info, message, snippet)
            for info in self.texts()
            for message, snippet in hits.get(
                info.id, [(None, info.title)] if query.matches(info.title) else []
            )
        ]

    def kv_file(self, text: int) -> Path:
        """Return the path of the KV cache of a text."""
        if self._single:
            return self.path.with_name(f"{self.path.name}.kv")
        return self.path.parent / "cache" / f"{text}.kv"

    def lock_file(self, text: int) -> Path:
        """Return the path of the file that is locked while a text is open."""
        return self.kv_file(text).with_suffix(".lock")

    # ---------------------------------------------------------------------------------------------
    # Contents
    # ---------------------------------------------------------------------------------------------

    def read(self, text: int) -> Contents:
        """Return a text with the messages from its root to its head."""
        with self._transaction("BEGIN"):
            rows = self._db.execute(
                "WITH RECURSIVE path (id, depth) AS ("
                " SELECT head, 0 FROM texts WHERE id = ? UNION ALL"
                " SELECT parent, depth + 1 FROM messages JOIN path USING (id)"
                f") SELECT {FIELDS} FROM path JOIN messages USING (id) ORDER BY depth DESC",
                (text,),
            ).fetchall()
            replaced = self._one("SELECT replaced FROM texts WHERE id = ?", text) or "[]"
            query = f"SELECT {FIELDS} FROM messages WHERE id = ?"
            kept = [self._db.execute(query, (each,)).fetchone() for each in json.loads(replaced)]
            path = [message_from(row) for row in rows]
            replaced = [message_from(row) for row in kept]
            return Contents(self.info(text), path, replaced, self.pictures(text))

    def settle(self, text: int) -> None:
        """Mark answers that were in progress when a program was killed as interrupted."""
        with self.change():
            self._db.execute(
                "UPDATE messages SET finish = ? WHERE text = ? AND finish IS NULL",
                (FINISH_INTERRUPTED, text),
            )

    def pictures(self, text: int) -> dict[str, bytes]:
        """Return the files of the pictures in a text, by their hashes."""
        with self._access():
            rows = self._db.execute(
                "SELECT hash, data FROM pictures WHERE EXISTS "
                "(SELECT 1 FROM messages WHERE text = ? AND instr(user, hash))",
                (text,),
            )
            return dict(rows.fetchall())

    def write(
        self,
        text: int,
        messages: Sequence[Message],
        replaced: Sequence[Message] = (),
        settings: Mapping[str, Any] | None = None,
        pictures: Mapping[str, bytes] | None = None,
    ) -> None:
        """Make messages the current path of a text; other messages stay as branches.

        Args:
            text: the text.
            messages: the path from the root to the new head.
            replaced: replaced answers to the last message.
            settings: new settings, as JSON values; None for no change.
            pictures: files of new pictures, by their hashes.

        Raises:
            SessionError: the disk is full, or the text was removed; nothing is changed.
        """
        self.info(text)
        known = self._paths.pop(text, [])
        n_same = 0
        for (_, stored), message in zip(known, messages, strict=False):
            if stored != message:
                break
            n_same += 1
        with self.change():
            n_changes, path = self._db.total_changes, known[:n_same]
            for message in messages[n_same:]:
                path.append((self._row_of(text, path[-1][0] if path else None, message), message))
            head, parent = ([None, None] + [row for row, _ in path])[:-3:-1]
            kept = [self._row_of(text, parent, answer) for answer in replaced]
            about = None if settings is None else json.dumps(settings)
            query = "SELECT head, replaced, settings FROM texts WHERE id = ?"
            before = self._db.execute(query, (text,)).fetchone()
            now = (head, json.dumps(kept), about or before[2])
            if n_changes == self._db.total_changes and now == before:
                self._paths[text] = path
                return
            n_tokens = sum(len(message.tokens) for message in messages) // 4
            self._db.execute(
                "UPDATE texts SET head = ?, replaced = ?, settings = ?, n_messages = ?, "
                "n_tokens = ?, changed = ? WHERE id = ?",
                (*now, len(messages), n_tokens, time.time(), text),
            )
            self._add_pictures(pictures or {})
        self._paths[text] = path

    def _row_of(self, text: int, parent: int | None, message: Message) -> int:
        """Return the id of a message, whose row is added or updated."""
        rows = self._db.execute(
            f"SELECT id, {FIELDS} FROM messages WHERE text = ? AND parent IS ? AND user = ? "
            "AND attempt = ? ORDER BY id DESC",
            (text, parent, message.user, message.attempt),
        )
        for row, *values in rows.fetchall():
            stored = message_from(values)
            if stored == message:
                return int(row)
            # the tokens around an answer depend on the chat template
            is_same = stored.answer == message.answer
            children = "SELECT 1 FROM messages WHERE parent = ? LIMIT 1"
            if is_same or (message.replaces(stored) and self._one(children, row) is None):
                names = ", ".join(f"{each.name} = ?" for each in fields(Message))
                self._db.execute(
                    f"UPDATE messages SET {names} WHERE id = ?", (*values_of(message), row)
                )
                return int(row)
        return self._insert(text, parent, time.time(), values_of(message))

    def _insert(self, text: int, parent: int | None, created: float, values: Sequence[Any]) -> int:
        marks = ", ".join("?" * (3 + len(values)))
        added = self._db.execute(
            f"INSERT INTO messages (text, parent, created, {FIELDS}) VALUES ({marks})",
            (text, parent, created, *values),
        )
        assert added.lastrowid is not None
        return added.lastrowid

    def _add_pictures(self, pictures: Mapping[str, bytes]) -> None:
        self._db.executemany("INSERT OR IGNORE INTO pictures VALUES (?, ?)", pictures.items())

    # ---------------------------------------------------------------------------------------------
    # Imported files
    # ---------------------------------------------------------------------------------------------

    def is_imported(self, file: str) -> bool:
        """Return whether a session file of an older pyh2o was imported."""
        return self._one("SELECT 1 FROM imported WHERE file = ?", file) is not None

    def mark_imported(self, file: str) -> None:
        """Remember that a file was imported."""
        with self.change():
            self._db.execute("INSERT OR IGNORE INTO imported VALUES (?)", (file,))

    # ---------------------------------------------------------------------------------------------
    # Access
    # ---------------------------------------------------------------------------------------------

    def _one(self, query: str, *values: Any) -> Any:
        """Return the first value of the first row, or None."""
        with self._access():
            row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def change(self) -> contextlib.AbstractContextManager[None]:
        """Make the changes of the context in one transaction; it may be nested."""
        return self._transaction("BEGIN IMMEDIATE")

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._access():
            is_nested = self._db.in_transaction
            if is_nested:
                yield
                return
            self._db.execute(begin)
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite ends it itself if the disk is full
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _access(self) -> Iterator[None]:
        """Exclude other threads; turn errors of SQLite and damaged JSON into a SessionError."""
        with self._lock:
            try:
                yield
            except SessionError:
                raise
            except (sqlite3.Error, OSError, ValueError, TypeError) as error:
                if "not a database" in str(error):
                    raise self._foreign() from error
                reason = getattr(error, "strerror", None) or " ".join(str(error).split())
                raise SessionError(f"cannot use the session file {self.path}: {reason}") from error

    def _foreign(self) -> SessionError:
        return SessionError(f"{self.path} is not a session file of pyh2o: check the name")
