"""Save a conversation after each change; a failure does not end the chat."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from pyh2o.errors import PyH2OError
from pyh2o.sessions.chats import locked, open_chats, title_of
from pyh2o.sessions.database import Database

from ..errors import InputError, one_line
from ..terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation


class Autosave:
    """Saves a conversation in the chats database, where its first save adds it.

    Attributes:
        enabled: whether to save at all.
        database: the chats; None if none is opened or saved.
        text: id of the conversation that was opened; None for a new one.
        failure: why the last save failed; "" if it succeeded.

    Args:
        enabled: whether to save at all.
        title: title of the conversation; "" for a new one. It may not exist yet.
        text: id of the conversation to open.

    Raises:
        SessionError: the session is open elsewhere, or the folder is not writable.
    """

    def __init__(self, enabled: bool, title: str = "") -> None:
        self.enabled = enabled
        self.database: Database | None = open_chats() if enabled or title else None
        self.text = self.database.find(title) if self.database is not None and title else None
        self._title = title
        self._lock = self._locked(self.text)
        self.failure = ""
        self._is_empty = False  # the saved text never had a turn
        self._saving: Future[None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1)

    def _locked(self, text: int | None) -> ExitStack:
        """Return an open lock of a text; none if nothing is saved."""
        lock = ExitStack()
        if self.enabled and self.database is not None and text is not None:
            lock.enter_context(locked(self.database, text))
        return lock

    @property
    def name(self) -> str:
        """The title of the conversation, or "" if it has none before the first save."""
        if self.database is None or self.text is None:
            return self._title
        return self.database.info(self.text).title

    def prepare(self, conversation: Conversation, message: str) -> None:
        """Add a new conversation to the database, so that its first answer is recorded there.

        Its title is that of the session, or the first words of the message.
        """
        self._title = self._title or title_of(message)
        if self.enabled and conversation.place is None:
            self._is_empty = self.text is None
            self._saving = self._worker.submit(self._save, conversation)
            self.settle()

    def save(self, conversation: Conversation, *, leaving: bool = False) -> None:
        """Start to save in the background, unless there is nothing to save.

        The conversation must not be used before `settle` is called.
        """
        self.settle()
        if self.enabled and (conversation.turns or self.text is not None):
            self._saving = self._worker.submit(self._save, conversation, leaving=leaving)

    def settle(self) -> bool:
        """Wait until all is saved; print a new failure in one line.

        Returns:
            Whether the last save succeeded.
        """
        before = self.failure
        self._wait()
        if self.failure and self.failure != before:
            terminal.say(f"warning: {self.failure}", style="yellow")
        return not self.failure

    def save_now(self, conversation: Conversation, *, leaving: bool = False) -> None:
        """Save a conversation and wait for it; raise an InputError if that fails."""
        self.settle()
        self._saving = self._worker.submit(self._save, conversation, leaving=leaving)
        self._wait()
        if self.failure:
            raise InputError(f"{self.failure}; /save FILE saves a copy elsewhere")

    def _save(self, conversation: Conversation, *, leaving: bool = False) -> None:
        assert self.database is not None
        self._is_empty = self._is_empty and not conversation.turns
        if conversation.place is None:
            title = self._title or next((title_of(turn.user) for turn in conversation.turns), "")
            now = time.strftime("%Y-%m-%d-%H%M%S")
            self.text = conversation.keep_in(self.database, title or now)
            self._lock = self._locked(self.text)
        conversation.store(leaving=leaving)

    def _wait(self) -> None:
        while self._saving is not None:
            try:
                # Ctrl-C has to wait: the cache must not be freed while it is saved.
                with suppress(KeyboardInterrupt):
                    self._saving.result()
                    self._saving, self.failure = None, ""
            except (PyH2OError, OSError, MemoryError) as error:
                self._saving = None
                self.failure = f"this chat is not saved: {one_line(error)}"

    @contextmanager
    def moving(self, text: int | None, *, leave: bool = True) -> Iterator[None]:
        """Switch to another session at the end of the body; an error leaves all unchanged.

        Args:
            text: the session; None for a new one.
            leave: whether the current session has something saved.
        """
        lock = self._locked(text)
        try:
            yield
        except BaseException:
            lock.close()
            raise
        if leave or text is not None:
            self._leave()
            self.text, self._lock, self._title = text, lock, ""

    def close(self) -> None:
        """Leave the session, and close the database."""
        self._leave()
        if self.database is not None:
            self.database.close()

    def _leave(self) -> None:
        """Wait until all is saved, and unlock the session; remove it if it is empty."""
        self.settle()
        if self._is_empty and self.database is not None and self.text is not None:
            with suppress(PyH2OError):
                self.database.remove(self.text)
            self._is_empty = False
        self._lock.close()
