"""A session that the server has open: the lock of its file, and its text while it has a slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from ..engine import Engine
from ..engine.slots import Slot
from ..limits import LOOK_SECONDS
from ..sessions.conversation import Conversation
from ..sessions.headers import CONVERSATION, STORY, SavedStory
from ..sessions.passages import TokenTexts
from ..sessions.records import record_of
from ..sessions.saved import ChatLock, SavedChat, copy_session
from ..sessions.session_file import read_session
from ..sessions.story import Story
from ..sessions.unfinished import path_beside
from ..writing.cached_text import Span
from .refusals import RefusedError
from .served_model import ServedModel

SessionText = Conversation | Story


class StoppedError(Exception):
    """The answer was cancelled before it began."""


class OpenSession:
    """A session whose file is locked, so that no terminal and no other server can open it.

    Its text stays in its last slot until another text needs the slot, and is then loaded from the
    file.

    Args:
        chat: the file.
        kind: kind of a new session, which has no file yet.

    Raises:
        SessionOpenError: it is open elsewhere.
        SessionError: the folder cannot be written.

    Attributes:
        kind: "conversation" or "story".
        recalled: evicted passages that the last answer retrieved; None if unknown.
        answering: whether an answer is generated, or waits for a slot.
        stopping: set it to end the current answer at its next token.
        gone: whether the session was removed or closed.
        n_users: number of requests that use it.
        idle_since: when the last of them ended.
    """

    def __init__(self, chat: SavedChat, kind: str = "") -> None:
        self.chat = chat
        self.kind = kind or read_session(chat.path, state=False).kind
        self.lock = ChatLock(chat)
        self.recalled: list[dict[str, Any]] | None = None
        self.answering = self.stopping = False
        self.gone = False
        self.n_users = 0
        self.idle_since = 0.0
        self._use = threading.Lock()
        self._state = threading.Lock()
        self._text: SessionText | None = None
        self._slot: Slot | None = None
        self._taken: Slot | None = None  # during a request
        self._engine: Engine | None = None
        self._texts: TokenTexts | None = None

    # ---------------------------------------------------------------------------------------------
    # One request after the other
    # ---------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self, check: Callable[[], None], *, answers: bool = False) -> Iterator[None]:
        """Hold the session alone; errors of `check` end the wait for other requests.

        Raises:
            RefusedError: an answer is being generated, or the session was removed.
        """
        with self._state:
            if self.answering:
                raise RefusedError(
                    409,
                    f"session {self.chat.name} is being answered: wait for the end of that, or "
                    "stop it (POST /v1/sessions/NAME/stop)",
                )
            self.answering, self.stopping = answers, False
        try:
            while not self._use.acquire(timeout=LOOK_SECONDS):
                check()
            try:
                if self.gone:
                    raise no_session(self.chat.name)
                yield
            finally:
                self._use.release()
        finally:
            if answers:
                self.answering = False

    @contextmanager
    def in_slot(self, model: ServedModel, *, answers: bool = False) -> Iterator[Slot]:
        """Hold the session alone, with its text in a slot; loaded if the slot was needed.

        After an error, the text is loaded from its file the next time.

        Raises:
            RefusedError: see `alone`.
            BusyError: no slot was free in time.
            SessionError: the session does not fit the model.
            StoppedError: the answer was cancelled while it waited.
        """

        def check() -> None:
            model.check()
            if answers and self.stopping:
                raise StoppedError

        with self.alone(check, answers=answers), self._in_slot(model, check) as slot:
            if not slot.keeps_text or self._slot is not slot or self._text is None:
                self._keep(self._load(slot), slot)
                if path_beside(self.chat.path).exists():
                    self.save()  # the unfinished message beside the file will be replaced
            yield slot

    @contextmanager
    def changed(self, model: ServedModel) -> Iterator[SessionText]:
        """Yield the text for a change; save it at the end."""
        with self.in_slot(model):
            yield self.text
            self.save()
            if isinstance(self.text, Story):  # its sampler has the old settings
                self._text = None

    @contextmanager
    def watched(self, model: ServedModel) -> Iterator[Slot]:
        """Yield its slot for reading, also during an answer."""
        written = self.answering_slot
        if written is not None:
            yield written
            return
        with self.in_slot(model) as slot:
            yield slot

    def begin(self, model: ServedModel, begin: Callable[[Slot], SessionText]) -> None:
        """Begin a text in a slot of the model, and save it."""
        with self.alone(model.check), self._in_slot(model, model.check) as slot:
            self._keep(begin(slot), slot)
            self.save()

    def move(self, model: ServedModel) -> None:
        """Continue with another model or other settings; the next answer reads the text again.

        The old session stays saved as `SavedChat.before`. The caller holds the session alone.

        Raises:
            BusyError: no slot was free in time.
            SessionError, SettingsError: the text does not fit the model; nothing was changed.
        """
        self.leave_slot()
        before = self.chat.before()
        try:
            with self._in_slot(model, model.check) as slot:
                self._keep(self._load(slot, reread=True), slot)
                copy_session(self.chat.path, before.path)
                try:
                    self.save()
                except BaseException:
                    before.remove()
                    raise
        except BaseException:
            self._text = None
            raise
        self.recalled = self._texts = None

    @contextmanager
    def _in_slot(self, model: ServedModel, check: Callable[[], None]) -> Iterator[Slot]:
        """Take its last slot, or an empty one."""
        with model.engine.slot(
            wait_seconds=model.limits.wait_seconds, check=check, owner=self
        ) as slot:
            self._engine, self._taken = model.engine, slot
            try:
                yield slot
            except BaseException:
                slot.keeps_text = False
                raise
            finally:
                self._taken = None

    def _load(self, slot: Slot, *, reread: bool = False) -> SessionText:
        kind: Any = Conversation if self.kind == CONVERSATION else Story
        return cast(SessionText, kind.load(self.chat.path, slot, reread=reread))

    def _keep(self, text: SessionText, slot: Slot) -> None:
        self._text, self._slot, slot.keeps_text = text, slot, True
        text.noted_beside = self.chat.path

    def save(self) -> None:
        """Save the text; after a SessionError, the old file is unchanged."""
        text = self.text
        if isinstance(text, Story):
            whole = text.text()
            passages = [start for start in text.notes.get("passages", ()) if start < len(whole)]
            text.notes = {**text.notes, "text": whole, "passages": passages}
        text.save(self.chat.path)

    def let_go(self) -> None:
        """Free its slot and its lock."""
        self.gone = True
        self.leave_slot()
        self._engine = None
        self.lock.close()

    def leave_slot(self) -> None:
        """Free its slot, before its files are moved."""
        if self._engine is not None:
            self._engine.move_out(self)
        self._text = None

    # ---------------------------------------------------------------------------------------------
    # What it is
    # ---------------------------------------------------------------------------------------------

    @property
    def text(self) -> SessionText:
        """The conversation or story; only while it has a slot."""
        assert self._text is not None
        return self._text

    @property
    def answering_slot(self) -> Slot | None:
        """The slot of the current answer; None without one."""
        return self._taken if self.answering and self._text is not None else None

    @property
    def pinned(self) -> list[Span]:
        """Spans that are never evicted, including the first tokens."""
        text = self.text
        first = [(0, min(text.n_pinned, len(text.tokens)))] if text.n_pinned else []
        return [*first, *((max(a, text.n_pinned), b) for a, b in text.pins if b > text.n_pinned)]

    def token_texts(self, model: ServedModel) -> TokenTexts:
        """Return the texts of all tokens."""
        text, hidden = self._text, list[Span]()
        if text is None:
            session = read_session(self.chat.path, state=False)
            tokens = session.tokens
            if self.kind == STORY:
                saved = record_of(SavedStory, session.header)
                hidden = saved.hidden(model.engine.model, tokens)
        else:
            tokens = list(text.tokens)
            hidden = text.hidden if isinstance(text, Story) else hidden
        with self._state:
            texts = self._texts = self._texts or TokenTexts(special=self.kind == CONVERSATION)
            texts.follow(model.engine.model, tokens, hidden)
            return texts


def no_session(name: str) -> RefusedError:
    """Return the error for a session that does not exist."""
    return RefusedError(404, f"there is no session {name}: GET /v1/sessions lists them")
