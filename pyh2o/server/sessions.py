"""The sessions of a server: those that are saved, by name, and those that it has open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ClosedError, SessionError
from ..models.file_identity import identify
from ..sessions.headers import ModelIdentity, SavedConversation, model_identity
from ..sessions.listing import SavedText, read_saved_text
from ..sessions.saved import ChatLock, SavedChat, new_chat, saved_chats
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

Stamp = tuple[int, int, int]


class Sessions:
    """Sessions by name, for the requests of all clients; each goes on with its own model."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._lock = threading.RLock()
        self._open: dict[str, OpenSession] = {}
        self._read: dict[str, tuple[Stamp, SavedText]] = {}

    def close(self) -> None:
        """Let go of all sessions; those in use stay locked until the program ends."""
        with self._lock:
            for session in list(self._open.values()):
                self._let_go_if_idle(session)

    # ---------------------------------------------------------------------------------------------
    # What is saved
    # ---------------------------------------------------------------------------------------------

    def saved(self, name: str) -> SavedText:
        """What the file of a session says.

        Raises:
            RefusedError: there is no such session.
            SessionError: no session can have this name.
        """
        chat = SavedChat(name)
        try:
            stamp = _stamp(chat.path)
            if (known := self._read.get(name)) and known[0] == stamp:
                return known[1]
            saved = read_saved_text(chat)
        except OSError:
            raise no_session(name) from None
        with self._lock:
            self._read.pop(name, None)
            self._read[name] = stamp, saved
            while len(self._read) > MOST_KNOWN:
                del self._read[next(iter(self._read))]
        return saved

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
            "max_tokens": None,
        }
        if saved.kind == "story":
            return {**about, "text": saved.text, "passages": list(saved.passages)}
        turns = [{**vars(turn), "attempts": [turn.attempt]} for turn in saved.turns]
        if turns and isinstance(saved.header, SavedConversation):
            turns[-1]["attempts"] = saved.header.said.attempts
        return {**about, "turns_list": turns}

    # ---------------------------------------------------------------------------------------------
    # Their models
    # ---------------------------------------------------------------------------------------------

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
            mine = None if source.embeds else _identity_of(source)
            if mine is None or not mine.is_same(wanted):
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
    def using(self, name: str | None, *, kind: str = "") -> Iterator[OpenSession]:
        """A session that this server has open, at least until the end.

        One of a `kind` is begun under this name, or under one of its own for None.

        Raises:
            RefusedError: there is no such session, or the name is taken.
            SessionOpenError: it is open elsewhere.
        """
        with self._lock:
            chat = SavedChat(name) if name else new_chat()
            if kind and (chat.name in self._open or chat.path.exists()):
                raise _taken_name(chat.name)
            if not kind and not chat.path.is_file():
                raise no_session(chat.name)
            if chat.name not in self._open:
                self._open[chat.name] = OpenSession(chat, kind)
            session = self._open[chat.name]
            session.n_users += 1
            session.idle.cancel()
        try:
            yield session
        finally:
            with self._lock:
                session.n_users -= 1
                if not session.n_users and not session.gone:
                    self._is_idle(session)

    def open_here(self, name: str) -> OpenSession | None:
        """A session that this server has open, or None."""
        with self._lock:
            return self._open.get(name)

    def _is_idle(self, session: OpenSession) -> None:
        """Nobody uses a session any more: it is let go after a while, or where too many are so."""
        if not session.chat.path.exists():  # it could not be begun
            self._let_go_if_idle(session)
            return
        session.idle = threading.Timer(IDLE_SECONDS, self._let_go_if_idle, [session])
        session.idle.daemon = True
        session.idle.start()
        self._open[session.chat.name] = self._open.pop(session.chat.name)  # the newest is last
        idle = [each for each in self._open.values() if not each.n_users]
        for oldest in idle[:-MOST_IDLE]:
            self._let_go_if_idle(oldest)

    def _let_go_if_idle(self, session: OpenSession) -> None:
        with self._lock:
            if not session.n_users and not session.gone:
                session.idle.cancel()
                del self._open[session.chat.name]
                session.let_go()

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


def _stamp(path: Path) -> Stamp:
    """What changes with a file."""
    about = path.stat()
    return about.st_mtime_ns, about.st_size, about.st_ino


def _identity_of(source: ModelSource) -> ModelIdentity | None:
    """What tells a model from others; None where nobody knows before it is loaded."""
    model = source.model
    if isinstance(model, ServedModel):
        with suppress(ClosedError):
            return model_identity(model.engine.model)
    if source.path is not None:
        with suppress(SessionError, OSError):
            return _file_identity(source.path, _stamp(source.path))
    return None


@lru_cache
def _file_identity(path: Path, _stamp: Stamp) -> ModelIdentity:
    return ModelIdentity(**identify(path).record())


def _taken_name(name: str) -> RefusedError:
    return RefusedError(409, f"there is a session {name}: give another name", param="name")
