"""A session that the server has open: its lock, and its text while it has a slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from ..engine import Engine
from ..engine.slots import Slot
from ..limits import LOOK_SECONDS
from ..sessions.chats import locked
from ..sessions.conversation import Conversation
from ..sessions.database import Database
from ..sessions.messages import CONVERSATION, STORY, unpacked
from ..sessions.passages import TokenTexts
from ..sessions.records import record_of
from ..sessions.story import Story
from ..sessions.story_notes import hidden_spans
from ..sessions.text_settings import StorySettings
from ..writing.cached_text import Span
from .refusals import RefusedError
from .served_model import ServedModel

SessionText = Conversation | Story


class StoppedError(Exception):
    """The answer was cancelled before it began."""


class OpenSession:
    """A session that is locked, so that no terminal and no other server can open it.

    Its text stays in its last slot until another text needs the slot, and is then loaded from the
    database.

    Args:
        database: the user's chats.
        name: title of the session.
        kind: kind of a new session, which is not in the database yet.

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

    def __init__(self, database: Database, name: str, kind: str = "") -> None:
        self.database, self.name = database, name
        self.id = database.find(name)
        self.kind = kind or database.info(self.stored).kind
        self._lock = ExitStack()
        if self.id is not None:
            self._lock.enter_context(locked(database, self.id))
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
                    f"session {self.name} is being answered: wait for the end of that, or "
                    "stop it (POST /v1/sessions/NAME/stop)",
                )
            self.answering, self.stopping = answers, False
        try:
            while not self._use.acquire(timeout=LOOK_SECONDS):
                check()
            try:
                if self.gone:
                    raise no_session(self.name)
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
            text = begin(slot)
            self._keep(text, slot)
            self.id = text.keep_in(self.database, self.name)
            self._lock.enter_context(locked(self.database, self.id))

    def move(self, model: ServedModel) -> None:
        """Continue with another model or other settings; the next answer reads the text again.

        The caller holds the session alone.

        Raises:
            BusyError: no slot was free in time.
            SessionError, SettingsError: the text does not fit the model; nothing was changed.
        """
        self.leave_slot()
        try:
            with self._in_slot(model, model.check) as slot:
                self._keep(self._load(slot), slot)
                self.save()
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

    def _load(self, slot: Slot) -> SessionText:
        kind: Any = Conversation if self.kind == CONVERSATION else Story
        return cast(SessionText, kind.open(self.database, self.stored, slot))

    def _keep(self, text: SessionText, slot: Slot) -> None:
        self._text, self._slot, slot.keeps_text = text, slot, True

    def save(self) -> None:
        """Save the text; after a SessionError, what was saved is unchanged."""
        self.text.store(leaving=True)

    def let_go(self) -> None:
        """Free its slot and its lock."""
        self.gone = True
        self.leave_slot()
        self._engine = None
        self._lock.close()

    def leave_slot(self) -> None:
        """Free its slot."""
        if self._engine is not None:
            self._engine.move_out(self)
        self._text = None

    # ---------------------------------------------------------------------------------------------
    # What it is
    # ---------------------------------------------------------------------------------------------

    @property
    def stored(self) -> int:
        """The id of its text in the database."""
        if self.id is None:
            raise no_session(self.name)
        return self.id

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
            contents = self.database.read(self.stored)
            tokens = unpacked(b"".join(message.tokens for message in contents.messages))
            if self.kind == STORY:
                saved = record_of(StorySettings, contents.info.settings)
                hidden = hidden_spans(
                    model.engine.model,
                    tokens,
                    saved.told,
                    n_prompt=saved.prompt_tokens,
                    has_opening=saved.opening > 0,
                    memory=saved.memory,
                )
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
