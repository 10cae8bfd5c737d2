"""The sessions of a server: saved ones by name, and those that it has open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from ..sessions.chats import open_chats, title_of
from ..sessions.database import Database
from ..sessions.identity import ModelIdentity
from ..sessions.listing import first_words, story_text
from ..sessions.messages import STORY, Contents, TextInfo
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
    """Sessions by name, for the requests of all clients; each has its own model."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._lock = threading.RLock()
        self._open: dict[str, OpenSession] = {}

    def let_go_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Close sessions that were unused for so long, and all but the newest unused ones."""
        with self._lock:
            idle = [each for each in self._open.values() if not each.n_users]
            idle.sort(key=lambda session: session.idle_since)
            latest = time.monotonic() - seconds
            old = [s for s in idle if s.idle_since <= latest or s.id is None]  # never begun
            for session in {*idle[:-MAX_IDLE], *old}:
                del self._open[session.name]
                session.let_go()

    # ---------------------------------------------------------------------------------------------
    # Saved sessions and their models
    # ---------------------------------------------------------------------------------------------

    @cached_property
    def database(self) -> Database:
        """The user's chats."""
        return open_chats()

    def info(self, name: str) -> TextInfo:
        """Return a session without its messages; a RefusedError if there is none."""
        text = self.database.find(name)
        if text is None:
            raise no_session(name)
        return self.database.info(text)

    def saved(self, name: str) -> Contents:
        """Return the contents of a session; a RefusedError if there is none."""
        contents = self.database.read(self.info(name).id)
        if name in self._open and self._open[name].answering:
            # a listed turn has an answer
            done = [message for message in contents.messages if message.finish is not None]
            return replace(contents, messages=done)
        return contents

    def listed(self, words: str) -> list[dict[str, Any]]:
        """Return summaries of the sessions with these words in a message or the title."""
        texts = self.database.texts()
        if words.strip():
            texts = list({hit.text.id: hit.text for hit in self.database.search(words)}.values())
        return [self.summary(info) for info in texts]

    def summary(self, info: TextInfo) -> dict[str, Any]:
        """Return a summary of a session."""
        source, why = self._source_of(info)
        return {
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

    def details(self, name: str) -> dict[str, Any]:
        """Return a session with its text; errors as in `saved`."""
        saved = self.saved(name)
        settings = saved.info.settings
        about = {
            **self.summary(saved.info),
            "system": settings.get("system"),
            "sampling": settings["sampling"],
            "note": settings["note"],
            "lore_entries": len(settings["lore"]),
        }
        if saved.info.kind == STORY:
            text = story_text(saved)
            starts, end = list[int](), len(text)
            for passage in reversed(saved.messages[1:]):
                end -= len(passage.answer)
                starts.insert(0, end)
            return {**about, "text": text, "passages": starts}
        dialogue, _ = dialogue_of(saved)
        turns = [{**asdict(turn), "attempts": [turn.attempt]} for turn in dialogue.turns]
        if turns:
            turns[-1]["attempts"] = dialogue.attempts
        return {**about, "turns": len(turns), "turns_list": turns}

    def source(self, name: str) -> ModelSource:
        """Return the model that a session was made with.

        Raises:
            RefusedError: there is no such session, or the server lacks its model.
        """
        source, why = self._source_of(self.info(name))
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
    def using(self, name: str | None, *, kind: str = "", said: str = "") -> Iterator[OpenSession]:
        """Open a session, for the duration of the context.

        With a `kind`, it is a new session; without a name, its name is made from `said`.

        Raises:
            RefusedError: there is no such session, or the name is taken.
            SessionOpenError: the session is open elsewhere.
        """
        with self._lock:
            name = name or self._unused(title_of(said) or time.strftime("%Y-%m-%d-%H%M%S"))
            is_saved = self.database.find(name) is not None
            if kind and (name in self._open or is_saved):
                raise _taken_name(name)
            if not kind and not is_saved:
                raise no_session(name)
            if name not in self._open:
                self._open[name] = OpenSession(self.database, name, kind)
            session = self._open[name]
            session.n_users += 1
        try:
            yield session
        finally:
            with self._lock:
                session.n_users -= 1
                session.idle_since = time.monotonic()
                self.let_go_idle()

    def _unused(self, title: str) -> str:
        """Return a title that no session has."""
        unused, number = title, 1
        while unused in self._open or self.database.find(unused) is not None:
            number += 1
            unused = f"{title} ({number})"
        return unused

    def stop(self, name: str) -> None:
        """End the current answer of a session, if any; errors as in `saved`."""
        self.info(name)
        with self._lock:
            if name in self._open:
                self._open[name].stopping = True

    def remove(self, name: str, check: Callable[[], None]) -> None:
        """Remove a session; a RefusedError if there is none, or it is in use."""
        with self.using(name) as session, session.alone(check), self._lock:
            session.leave_slot()
            self.database.remove(session.stored)
            del self._open[name]
            session.let_go()

    def rename(self, name: str, new: str, check: Callable[[], None]) -> None:
        """Rename a session; a RefusedError as in `remove`, or if the name is taken."""
        with self.using(name) as session, session.alone(check), self._lock:
            if self.database.find(new) is not None or new in self._open:
                raise _taken_name(new)
            self.database.rename(session.stored, new)
            session.name = new
            self._open[new] = self._open.pop(name)


def _model_of(info: TextInfo) -> ModelIdentity:
    return record_of(ModelIdentity, info.settings["model"], "model")


def _taken_name(name: str) -> RefusedError:
    return RefusedError(409, f"there is a session {name}: give another name", param="name")
