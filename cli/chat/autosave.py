"""Saves a conversation after each change; a failure to do so never ends the chat."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pyh2o.errors import PyH2OError
from pyh2o.sessions.saved import ChatLock, SavedChat, copy_session, new_chat
from pyh2o.sessions.unfinished import path_beside

from ..errors import InputError, one_line
from ..terminal.terminal import terminal

if TYPE_CHECKING:
    from pyh2o.sessions.conversation import Conversation


class Autosave:
    """Where a conversation is saved. A chat without a name gets one with its first message.

    Attributes:
        failure: why the last save failed; "" if it did not.

    Args:
        enabled: False never saves.
        chat: the chat that was opened by its name, or None for a new one.

    Raises:
        InputError: the chat is open elsewhere, or the folder cannot be written.
    """

    def __init__(self, enabled: bool, chat: SavedChat | None = None) -> None:
        self.enabled = enabled
        self._chat = chat
        self._lock = ChatLock(chat) if enabled and chat else None
        self._before: SavedChat | None = None  # what is to be kept of the file there is
        self.failure = ""
        self._is_empty = False  # the file there is has nothing yet that was said
        self._saving: Future[None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1)

    @property
    def name(self) -> str:
        """The name to continue with, or "" before the first save."""
        return self._chat.name if self._chat else ""

    @property
    def path(self) -> Path | None:
        """Where it is saved; None before the first save, or where that keeps the file there is."""
        is_kept = not self.enabled or self._before is not None
        return None if is_kept or self._chat is None else self._chat.path

    def keep_before(self) -> SavedChat | None:
        """Before the next save, let there be a copy of the session as it is saved now, if it is."""
        if self.enabled and self._chat is not None and self._chat.path.exists():
            self._before = self._chat.before()
        return self._before

    def begin(self, conversation: Conversation) -> None:
        """Have the file there beside which the next answer is noted; a failure is said."""
        path = None if self._chat is None else self._chat.path
        is_there = path is not None and path.exists()
        # a note of an answer that was cut off makes room for one of the next
        is_as_it_was = path is not None and is_there and not path_beside(path).exists()
        if self.enabled and self._before is None and not is_as_it_was:
            self._is_empty = not is_there
            self._saving = self._worker.submit(self._save, conversation)
            self.settle()

    def save(self, conversation: Conversation) -> None:
        """Begin to save, unless there is nothing to save.

        That goes on while a person reads and types; nothing may be done with the conversation
        before `settle` has been called.
        """
        self.settle()
        is_saved = self._chat is not None and self._chat.path.exists()
        if self.enabled and (conversation.turns or is_saved):
            self._saving = self._worker.submit(self._save, conversation)

    def settle(self) -> bool:
        """Wait until all is saved; a failure is said once, in one line.

        Returns:
            Whether the last save succeeded.
        """
        said = self.failure
        self._wait()
        if self.failure and self.failure != said:
            terminal.say(f"warning: {self.failure}", style="yellow")
        return not self.failure

    def save_now(self, conversation: Conversation) -> None:
        """Save a conversation, and wait for it; a failure is an error."""
        self.settle()
        self._saving = self._worker.submit(self._save, conversation)
        self._wait()
        if self.failure:
            raise InputError(f"{self.failure}; /save FILE saves a copy elsewhere")

    def _save(self, conversation: Conversation) -> None:
        if self._chat is None:
            chat = new_chat()
            self._lock = ChatLock(chat)
            self._chat = chat
        if self._before is not None:
            copy_session(self._chat.path, self._before.path)
            self._before = None
        self._is_empty = self._is_empty and not conversation.turns
        conversation.save(self._chat.path)

    def _wait(self) -> None:
        while self._saving is not None:
            try:
                # Ctrl-C has to wait: the cache must not go away while it is read.
                with suppress(KeyboardInterrupt):
                    self._saving.result()
                    self._saving, self.failure = None, ""
            except (PyH2OError, OSError, MemoryError) as error:
                self._saving = None
                self.failure = f"this chat is not saved: {one_line(error)}"

    @contextmanager
    def moving(self, chat: SavedChat | None, *, leave: bool = True) -> Iterator[None]:
        """Open what is to be saved from the end of this on; what fails leaves all as it is.

        Args:
            chat: where it is saved; None for a new place.
            leave: whether there is something in the place so far.
        """
        lock = ChatLock(chat) if self.enabled and chat is not None else None
        try:
            yield
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        if leave or chat is not None:
            self.close()
            self._chat, self._lock, self._before = chat, lock, None

    def close(self) -> None:
        """Let other chats have the place, when all is saved."""
        self.settle()
        if self._is_empty and self._chat is not None:
            with suppress(OSError):  # it could not be written
                self._chat.remove()
            self._is_empty = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None
