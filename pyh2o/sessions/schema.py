"""The tables of the database of texts."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

SCHEMA = r"""
CREATE TABLE texts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    title TEXT NOT NULL UNIQUE,
    created REAL NOT NULL,
    changed REAL NOT NULL,
    settings TEXT NOT NULL DEFAULT '{}',
    head INTEGER,
    replaced TEXT NOT NULL DEFAULT '[]',
    n_messages INTEGER NOT NULL DEFAULT 0,
    n_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    text INTEGER NOT NULL REFERENCES texts (id) ON DELETE CASCADE,
    -- no cascade: SQLite limits its depth to 1000
    parent INTEGER REFERENCES messages (id) DEFERRABLE INITIALLY DEFERRED,
    created REAL NOT NULL,
    user TEXT NOT NULL,
    answer TEXT NOT NULL,
    finish TEXT,
    attempt INTEGER NOT NULL,
    n_before INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    about TEXT NOT NULL
);
CREATE INDEX children ON messages (parent, text);
CREATE INDEX messages_of_text ON messages (text);
CREATE TABLE pictures (hash TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE imported (file TEXT PRIMARY KEY);
-- FTS5 stops at a NUL character. json_quote escapes it, and also quotes and backslashes.
CREATE VIEW searched AS SELECT
    id,
    iif(
        instr(user, char(0)), replace(replace(json_quote(user), '\"', '"'), '\\', '\'), user
    ) AS user,
    iif(
        instr(answer, char(0)), replace(replace(json_quote(answer), '\"', '"'), '\\', '\'), answer
    ) AS answer
FROM messages;
CREATE VIRTUAL TABLE found USING fts5 (
    user, answer, content = searched, content_rowid = id, tokenize = trigram
);
CREATE TRIGGER added AFTER INSERT ON messages BEGIN
    INSERT INTO found (rowid, user, answer) SELECT * FROM searched WHERE id = new.id;
END;
CREATE TRIGGER removed BEFORE DELETE ON messages BEGIN
    INSERT INTO found (found, rowid, user, answer)
    SELECT 'delete', * FROM searched WHERE id = old.id;
END;
CREATE TRIGGER replaced BEFORE UPDATE ON messages
WHEN old.user IS NOT new.user OR old.answer IS NOT new.answer BEGIN
    INSERT INTO found (found, rowid, user, answer)
    SELECT 'delete', * FROM searched WHERE id = old.id;
END;
CREATE TRIGGER changed AFTER UPDATE ON messages
WHEN old.user IS NOT new.user OR old.answer IS NOT new.answer BEGIN
    INSERT INTO found (rowid, user, answer) SELECT * FROM searched WHERE id = new.id;
END;
"""


def statements(script: str) -> Iterator[str]:
    """Yield the statements of a script; `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
