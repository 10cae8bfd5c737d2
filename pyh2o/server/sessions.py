"""The sessions of a server: saved ones by name, and those that it has open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import SessionError
from ..sessions.headers import SavedConversation
from ..sessions.listing import SavedText, read_saved_text
from ..sessions.saved import ChatLock, SavedChat, new_chat, saved_chats
from ..sessions.unfinished import path_beside
from .models import ModelSource, ServedModels
from .open_session import OpenSession, no_session
from .refusals import RefusedError, without_folders
from .served_model import ServedModel

# An unused session is closed after this time, so that a terminal can open it.
IDLE_SECONDS = 300.0
# Maximum number of unused open sessions: each takes a file and a thread.
MAX_IDLE = 32
# Maximum number of session files whose contents are cached.
MAX_KNOWN = 4096


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
            # without a file, it was never begun
            old = [s for s in idle if s.idle_since <= latest or not s.chat.path.exists()]
            for session in {*idle[:-MAX_IDLE], *old}:
                del self._open[session.chat.name]
                session.let_go()

    # ---------------------------------------------------------------------------------------------
    # Saved sessions and their models
    # ---------------------------------------------------------------------------------------------

    def saved(self, name: str) -> SavedText:
        """Return the contents of a session file.

        Raises:
            RefusedError: there is no such session.
            SessionError: the name is invalid.
        """
        chat = SavedChat(name)
        try:
            # a listed turn has an answer
            is_answering = name in self._open and self._open[name].answering
            return _read(chat, chat.path, _stamp(chat.path), not is_answering)
        except OSError:
            raise no_session(name) from None

    def listed(self, words: str) -> list[dict[str, Any]]:
        """Return summaries of the sessions with these words in the name or text."""
        found = []
        for chat in saved_chats():
            with suppress(RefusedError):  # just removed
                saved = self.saved(chat.name)
                if saved.has(words):
                    found.append(self.summary(saved))
        return found

    def summary(self, saved: SavedText) -> dict[str, Any]:
        """Return a summary of a session."""
        source, why = self._source_of(saved)
        return {
            "name": saved.name,
            "kind": saved.kind or "conversation",
            "model": source and source.name,
            "made_with": saved.header and saved.header.model.file,
            "changed": saved.changed,
            "bytes": saved.n_bytes,
            "turns": len(saved.turns),
            "tokens": saved.n_tokens,
            "first": saved.first,
            "usable": not why,
            "why": why,
        }

    def details(self, name: str) -> dict[str, Any]:
        """Return a session with its text; errors as in `saved`."""
        saved = self.saved(name)
        about = {
            **self.summary(saved),
            "system": saved.system,
            "sampling": saved.sampling,
        }
        if saved.header is not None:
            about |= {"note": saved.header.note, "lore_entries": len(saved.header.lore)}
        if saved.kind == "story":
            return {**about, "text": saved.text, "passages": list(saved.passages)}
        turns = [{**asdict(turn), "attempts": [turn.attempt]} for turn in saved.turns]
        if turns and isinstance(saved.header, SavedConversation):
            turns[-1]["attempts"] = saved.header.dialogue.attempts
        return {**about, "turns_list": turns}

    def source(self, name: str) -> ModelSource:
        """Return the model that a session was made with.

        Raises:
            RefusedError: there is no such session, or the server lacks its model.
            SessionError: the name is invalid.
        """
        source, why = self._source_of(self.saved(name))
        if source is None:
            raise RefusedError(400, why)
        return source

    def _source_of(self, saved: SavedText) -> tuple[ModelSource | None, str]:
        """Return the model of a session, and why the session cannot be used; "" if it can."""
        if saved.header is None:
            return None, without_folders(saved.trouble)
        wanted = saved.header.model
        for source in self._models.sources:
            if source.identity is None or not source.identity.is_same(wanted):
                continue
            model = source.model
            if isinstance(model, ServedModel):
                try:
                    saved.header.check_made_with(model.engine.model)
                except SessionError as error:
                    return source, without_folders(str(error))
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
            chat = SavedChat(name) if name else new_chat(said)
            if kind and (chat.name in self._open or chat.path.exists()):
                raise _taken_name(chat.name)
            if not kind and not chat.path.is_file():
                raise no_session(chat.name)
            if chat.name not in self._open:
                self._open[chat.name] = OpenSession(chat, kind)
            session = self._open[chat.name]
            session.n_users += 1
        try:
            yield session
        finally:
            with self._lock:
                session.n_users -= 1
                session.idle_since = time.monotonic()
                self.let_go_idle()

    def stop(self, name: str) -> None:
        """End the current answer of a session, if any; errors as in `saved`."""
        self.saved(name)
        with self._lock:
            if name in self._open:
                self._open[name].stopping = True

    def remove(self, name: str, check: Callable[[], None]) -> None:
        """Remove a session; a RefusedError if there is none, or it is in use."""
        with self.using(name) as session, session.alone(check), self._lock:
            session.leave_slot()
            session.chat.remove()
            del self._open[name]
            session.let_go()

    def rename(self, name: str, new: str, check: Callable[[], None]) -> None:
        """Rename a session; a RefusedError as in `remove`, or if the name is taken."""
        other = SavedChat(new)
        with self.using(name) as session, session.alone(check), self._lock:
            if other.path.exists() or new in self._open:
                raise _taken_name(new)
            lock = ChatLock(other)
            try:
                session.leave_slot()
                session.chat.rename(other)
            except BaseException:
                lock.close()
                raise
            session.lock.close()
            session.chat, session.lock = other, lock
            self._open[new] = self._open.pop(name)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes with a file."""
    about = path.stat()
    with suppress(FileNotFoundError):
        about = path_beside(path).stat()
    return about.st_mtime_ns, about.st_size, about.st_ino


@lru_cache(MAX_KNOWN)
def _read(chat: SavedChat, _path: Path, _stamp: tuple[int, int, int], noted: bool) -> SavedText:
    return read_saved_text(chat, in_progress=noted)


def _taken_name(name: str) -> RefusedError:
    return RefusedError(409, f"there is a session {name}: give another name", param="name")
