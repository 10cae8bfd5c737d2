"""The sessions of a server: stored ones, and those that it has open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from ..errors import SessionError
from ..sessions.chats import open_chats
from ..sessions.database import Database
from ..sessions.identity import ModelIdentity
from ..sessions.listing import first_words, story_text
from ..sessions.messages import STORY, Contents, Found, TextInfo
from ..sessions.records import record_of
from ..sessions.text_settings import dialogue_of
from .models import ModelSource, ServedModels
from .open_session import OpenSession, no_session
from .refusals import RefusedError

# An unused session is closed after this time, so that a terminal can open it.
IDLE_SECONDS = 300.0
# Maximum number of unused open sessions: each takes a file and a thread.
MAX_IDLE = 32


class Sessions:
    """Sessions by their ids, for the requests of all clients; each has its own model."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._lock = threading.RLock()
        self._open: dict[int, OpenSession] = {}

    @cached_property
    def database(self) -> Database:
        """The user's chats."""
        return open_chats()

    def close_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Close sessions that were unused for this time, and all but the newest unused ones."""
        with self._lock:
            idle = [each for each in self._open.values() if not each.n_users]
            idle.sort(key=lambda session: session.idle_since)
            latest = time.monotonic() - seconds
            old = [session for session in idle if session.idle_since <= latest]
            for session in {*idle[:-MAX_IDLE], *old}:
                del self._open[session.id]
                session.close()

    def close(self) -> None:
        """Store and close all sessions, and close the database."""
        self.close_idle(0)
        if "database" in vars(self):
            self.database.close()

    # ---------------------------------------------------------------------------------------------
    # Stored sessions and their models
    # ---------------------------------------------------------------------------------------------

    def info(self, number: int) -> TextInfo:
        """Return a session without its messages; a RefusedError if there is none."""
        try:
            return self.database.info(number)
        except SessionError as error:
            if error.__cause__ is not None:  # SQLite failed
                raise
            raise no_session(number) from None

    def contents(self, number: int) -> Contents:
        """Return a session with its messages; a RefusedError if there is none."""
        contents = self.database.read(self.info(number).id)
        session = self._open.get(number)
        if session is not None and session.answering:
            # a listed turn has an answer
            done = [message for message in contents.messages if message.finish is not None]
            return replace(contents, messages=done)
        return contents

    def listed(self, words: str) -> list[dict[str, Any]]:
        """Return summaries of all sessions, or with snippets of those that contain these words."""
        if not words.strip():
            return [self.summary(info) for info in self.database.texts()]
        first: dict[int, Found] = {}
        for hit in self.database.search(words):
            first.setdefault(hit.text.id, hit)
        return [{**self.summary(hit.text), "snippet": hit.snippet} for hit in first.values()]

    def summary(self, info: TextInfo) -> dict[str, Any]:
        """Return a summary of a session."""
        source, why = self._source_of(info)
        return {
            "id": info.id,
            "name": info.title,
            "kind": info.kind,
            "model": source and source.name,
            "made_with": _model_of(info).file,
            "changed": info.changed,
            "turns": 0 if info.kind == STORY else info.n_messages,
            "tokens": info.n_tokens,
            "first": first_words(self.database, info.id),
            "usable": not why,
            "why": why,
        }

    def details(self, number: int) -> dict[str, Any]:
        """Return a session with its text; errors as in `contents`."""
        contents = self.contents(number)
        settings = contents.info.settings
        about = {
            **self.summary(contents.info),
            "system": settings.get("system"),
            "sampling": settings["sampling"],
            "note": settings["note"],
            "lore_entries": len(settings["lore"]),
        }
        if contents.info.kind == STORY:
            text = story_text(contents)
            starts, end = list[int](), len(text)
            for passage in reversed(contents.messages[1:]):
                end -= len(passage.answer)
                starts.insert(0, end)
            return {**about, "text": text, "passages": starts}
        dialogue, _ = dialogue_of(contents)
        turns = [{**asdict(turn), "attempts": [turn.attempt]} for turn in dialogue.turns]
        if turns:
            turns[-1]["attempts"] = dialogue.attempts
        return {**about, "turns": len(turns), "turns_list": turns}

    def source(self, number: int) -> ModelSource:
        """Return the model that a session was made with.

        Raises:
            RefusedError: there is no such session, or the server lacks its model.
        """
        source, why = self._source_of(self.info(number))
        if source is None:
            raise RefusedError(400, why)
        return source

    def _source_of(self, info: TextInfo) -> tuple[ModelSource | None, str]:
        """Return the model of a session, and why the session cannot be used; "" if it can."""
        wanted = _model_of(info)
        for source in self._models.sources:
            if source.identity is not None and source.identity.is_same(wanted):
                return source, ""
        return None, (
            f"this session was made with the model {wanted.file}, which this server lacks: serve "
            "it too (--model FILE), or choose another model, which reads the text again"
        )

    # ---------------------------------------------------------------------------------------------
    # Open sessions
    # ---------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, number: int) -> Iterator[OpenSession]:
        """Open a session, for the duration of the context.

        Raises:
            RefusedError: there is no such session.
            SessionOpenError: the session is open elsewhere.
        """
        with self._lock:
            if number not in self._open:
                self._open[number] = OpenSession(self.database, self.info(number))
            session = self._open[number]
            session.n_users += 1
        try:
            yield session
        finally:
            with self._lock:
                session.n_users -= 1
                session.idle_since = time.monotonic()
                self.close_idle()

    def stop(self, number: int) -> None:
        """End the current answer of a session, if any; a RefusedError if there is no session."""
        self.info(number)
        session = self._open.get(number)
        if session is not None:
            session.stopping = True

    def remove(self, number: int, check: Callable[[], None]) -> None:
        """Remove a session; a RefusedError if there is none, or it is being answered."""
        with self.using(number) as session, session.alone(check), self._lock:
            self.database.remove(number)  # first, so that closing stores no KV cache
            del self._open[number]
            session.close()

    def rename(self, number: int, title: str) -> None:
        """Rename a session; a RefusedError if there is none, or another one has the title."""
        self.info(number)
        if self.database.find(title) not in (None, number):
            raise RefusedError(409, f"there is a session {title}: give another name", param="name")
        self.database.rename(number, title)


def _model_of(info: TextInfo) -> ModelIdentity:
    return record_of(ModelIdentity, info.settings["model"], "model")
