"""A session that the server has open: its lock, and its text while that is in a place."""

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
    """Somebody wants the answer no more, before it has begun."""


class OpenSession:
    """One session, of which nobody else has the file: not a terminal, not another server.

    Its text stays in the place where it was used last until another text needs that, and is read
    from the file then.

    Args:
        chat: where it is saved.
        kind: of a session that is not saved yet.

    Raises:
        SessionOpenError: it is open elsewhere.
        SessionError: the folder cannot be written.

    Attributes:
        kind: "conversation" or "story".
        recalled: evicted passages that the last answer has looked at; None if nobody knows.
        answering: whether an answer is made, or waits for a place.
        stopping: set to end the answer that is made at its next token.
        gone: whether it was removed, or let go.
        n_users: requests that use it.
        idle_since: when the last one of them ended.
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
        self._place: Slot | None = None
        self._taken: Slot | None = None  # while it is used
        self._engine: Engine | None = None
        self._texts: TokenTexts | None = None

    # ---------------------------------------------------------------------------------------------
    # One request after the other
    # ---------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self, check: Callable[[], None], *, answers: bool = False) -> Iterator[None]:
        """While nobody else reads or changes it; what `check` raises ends the wait for others.

        Raises:
            RefusedError: an answer is being made, or the session was removed.
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
    def placed(self, model: ServedModel, *, answers: bool = False) -> Iterator[Slot]:
        """Alone, with its text in a place of the model; loaded, if it is not there any more.

        Whatever goes wrong meanwhile, the text is loaded from its file the next time.

        Raises:
            RefusedError: as `alone` does.
            BusyError: there was no place in time.
            SessionError: the session does not fit the model.
            StoppedError: an answer was to be made, and was stopped while it waited.
        """

        def check() -> None:
            model.check()
            if answers and self.stopping:
                raise StoppedError

        with self.alone(check, answers=answers), self._in_place(model, check) as place:
            if not place.keeps_text or self._place is not place or self._text is None:
                self._keep(self._load(place), place)
                if path_beside(self.chat.path).exists():
                    self.save()  # a note of what comes now takes its place
            yield place

    @contextmanager
    def changed(self, model: ServedModel) -> Iterator[SessionText]:
        """The text in its place, to be changed; saved at the end."""
        with self.placed(model):
            yield self.text
            self.save()
            if isinstance(self.text, Story):  # what draws its tokens has the old sampling
                self._text = None

    @contextmanager
    def watched(self, model: ServedModel) -> Iterator[Slot]:
        """Its place, to be looked at: beside an answer in the making, too."""
        written = self.written_place
        if written is not None:
            yield written
            return
        with self.placed(model) as place:
            yield place

    def begin(self, model: ServedModel, begin: Callable[[Slot], SessionText]) -> None:
        """Have a text begin in a place of the model, and save it."""
        with self.alone(model.check), self._in_place(model, model.check) as place:
            self._keep(begin(place), place)
            self.save()

    def move(self, model: ServedModel) -> None:
        """Go on with another model, or under other settings: the next answer reads all again.

        As it was it stays saved under the name that `SavedChat.before` gives. The caller is alone.

        Raises:
            BusyError: there was no place in time.
            SessionError, SettingsError: the model cannot have the text; all stays as it was.
        """
        self.leave_place()
        before = self.chat.before()
        try:
            with self._in_place(model, model.check) as place:
                self._keep(self._load(place, reread=True), place)
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
    def _in_place(self, model: ServedModel, check: Callable[[], None]) -> Iterator[Slot]:
        """A place of the model: the one where it has been, or an empty one."""
        with model.engine.slot(
            wait_seconds=model.limits.wait_seconds, check=check, owner=self
        ) as place:
            self._engine, self._taken = model.engine, place
            try:
                yield place
            except BaseException:
                place.keeps_text = False
                raise
            finally:
                self._taken = None

    def _load(self, place: Slot, *, reread: bool = False) -> SessionText:
        kind: Any = Conversation if self.kind == CONVERSATION else Story
        return cast(SessionText, kind.load(self.chat.path, place, reread=reread))

    def _keep(self, text: SessionText, place: Slot) -> None:
        self._text, self._place, place.keeps_text = text, place, True
        text.noted_beside = self.chat.path

    def save(self) -> None:
        """Save the text as it is now; a SessionError leaves the old file unchanged."""
        text = self.text
        if isinstance(text, Story):
            whole = text.text()
            passages = [start for start in text.notes.get("passages", ()) if start < len(whole)]
            text.notes = {**text.notes, "text": whole, "passages": passages}
        text.save(self.chat.path)

    def let_go(self) -> None:
        """Free its place and its lock, for good."""
        self.gone = True
        self.leave_place()
        self._engine = None
        self.lock.close()

    def leave_place(self) -> None:
        """Free its place: the files are to be moved."""
        if self._engine is not None:
            self._engine.move_out(self)
        self._text = None

    # ---------------------------------------------------------------------------------------------
    # What it is
    # ---------------------------------------------------------------------------------------------

    @property
    def text(self) -> SessionText:
        """The conversation or the story, while it is placed."""
        assert self._text is not None
        return self._text

    @property
    def written_place(self) -> Slot | None:
        """The place in which an answer is being made now; None if there is none."""
        return self._taken if self.answering and self._text is not None else None

    @property
    def pinned(self) -> list[Span]:
        """Spans that are never evicted, the first tokens among them."""
        text = self.text
        first = [(0, min(text.n_pinned, len(text.tokens)))] if text.n_pinned else []
        return [*first, *((max(a, text.n_pinned), b) for a, b in text.pins if b > text.n_pinned)]

    def token_texts(self, model: ServedModel) -> TokenTexts:
        """The texts of all tokens."""
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
    """What is said of a session that is not there."""
    return RefusedError(404, f"there is no session {name}: GET /v1/sessions lists them")
