"""The sessions of a server: those that are saved, by name, and those that it has open."""

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

# A session that nobody has asked for is let go, so that a terminal can open it.
IDLE_SECONDS = 300.0
# Of those that nobody uses so many stay open: each takes a file and a thread.
MOST_IDLE = 32
# Sessions of which is remembered what their files say.
MOST_KNOWN = 4096


class Sessions:
    """Sessions by name, for the requests of all clients; each goes on with its own model."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._lock = threading.RLock()
        self._open: dict[str, OpenSession] = {}

    def let_go_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Let go of sessions that nobody has used for so long, and of all but the newest idle ones.

        Those in use stay locked until the program ends.
        """
        with self._lock:
            idle = [each for each in self._open.values() if not each.n_users]
            idle.sort(key=lambda session: session.idle_since)
            latest = time.monotonic() - seconds
            # one whose file is not there could not be begun
            old = [s for s in idle if s.idle_since <= latest or not s.chat.path.exists()]
            for session in {*idle[:-MOST_IDLE], *old}:
                del self._open[session.chat.name]
                session.let_go()

    # ---------------------------------------------------------------------------------------------
    # What is saved, and by which model
    # ---------------------------------------------------------------------------------------------

    def saved(self, name: str) -> SavedText:
        """What the file of a session says.

        Raises:
            RefusedError: there is no such session.
            SessionError: no session can have this name.
        """
        chat = SavedChat(name)
        try:
            # clients take a turn that is there for one that was answered
            is_answering = name in self._open and self._open[name].answering
            return _read(chat, chat.path, _stamp(chat.path), not is_answering)
        except OSError:
            raise no_session(name) from None

    def listed(self, words: str) -> list[dict[str, Any]]:
        """Summaries of all that have these words in their names or texts."""
        found = []
        for chat in saved_chats():
            with suppress(RefusedError):  # removed since
                saved = self.saved(chat.name)
                if saved.has(words):
                    found.append(self.summary(saved))
        return found

    def summary(self, saved: SavedText) -> dict[str, Any]:
        """A session in a few words."""
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
        """A session with all of its text; raises what `saved` does."""
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
        """The model that a session was made with.

        Raises:
            RefusedError: there is no such session, or it cannot be gone on with here.
            SessionError: no session can have this name.
        """
        source, why = self._source_of(self.saved(name))
        if source is None:
            raise RefusedError(400, why)
        return source

    def _source_of(self, saved: SavedText) -> tuple[ModelSource | None, str]:
        """The model of a session, and why it cannot be used; "" if it can, as far as is known."""
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
            f"this session was made with the model {wanted.file}, which this server does not have: "
            "serve it too (--model FILE), or give it another one, which reads its text again"
        )

    # ---------------------------------------------------------------------------------------------
    # Those that are open
    # ---------------------------------------------------------------------------------------------

    @contextmanager
    def using(self, name: str | None, *, kind: str = "", said: str = "") -> Iterator[OpenSession]:
        """A session that this server has open, at least until the end.

        One of a `kind` is begun under this name, or for None under one of what is `said` first.

        Raises:
            RefusedError: there is no such session, or the name is taken.
            SessionOpenError: it is open elsewhere.
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
        """Stop the answer that is made of a session, if there is one; raises what `saved` does."""
        self.saved(name)
        with self._lock:
            if name in self._open:
                self._open[name].stopping = True

    def remove(self, name: str, check: Callable[[], None]) -> None:
        """Remove a session for good, or refuse it: there is none, or it is in use."""
        with self.using(name) as session, session.alone(check), self._lock:
            session.leave_place()
            session.chat.remove()
            del self._open[name]
            session.let_go()

    def rename(self, name: str, new: str, check: Callable[[], None]) -> None:
        """Give a session another name, or refuse it as for `remove`; so where the name is taken."""
        other = SavedChat(new)
        with self.using(name) as session, session.alone(check), self._lock:
            if other.path.exists() or new in self._open:
                raise _taken_name(new)
            lock = ChatLock(other)
            try:
                session.leave_place()
                session.chat.rename(other)
            except BaseException:
                lock.close()
                raise
            session.lock.close()
            session.chat, session.lock = other, lock
            self._open[new] = self._open.pop(name)


def _stamp(path: Path) -> tuple[int, int, int]:
    """What changes with a file."""
    about = path.stat()
    with suppress(FileNotFoundError):
        about = path_beside(path).stat()
    return about.st_mtime_ns, about.st_size, about.st_ino


@lru_cache(MOST_KNOWN)
def _read(chat: SavedChat, _path: Path, _stamp: tuple[int, int, int], noted: bool) -> SavedText:
    return read_saved_text(chat, in_progress=noted)


def _taken_name(name: str) -> RefusedError:
    return RefusedError(409, f"there is a session {name}: give another name", param="name")
