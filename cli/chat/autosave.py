"""Save a conversation after each change; a failure does not end the chat."""

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
    """Saves a conversation in a session, which gets a name with the first message.

    Attributes:
        failure: why the last save failed; "" if it succeeded.

    Args:
        enabled: whether to save at all.
        chat: the session that was opened by name, or None for a new one.

    Raises:
        InputError: the session is open elsewhere, or the folder is not writable.
    """

    def __init__(self, enabled: bool, chat: SavedChat | None = None) -> None:
        self.enabled = enabled
        self._chat = chat
        self._lock = ChatLock(chat) if enabled and chat else None
        self._before: SavedChat | None = None  # name for a copy of the current file
        self.failure = ""
        self._is_empty = False  # the current file has no turns
        self._saving: Future[None] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1)

    @property
    def name(self) -> str:
        """The name of the session, or "" before the first save."""
        return self._chat.name if self._chat else ""

    @property
    def path(self) -> Path | None:
        """The session file; None before the first save, also after `keep_before`."""
        is_kept = not self.enabled or self._before is not None
        return None if is_kept or self._chat is None else self._chat.path

    def keep_before(self) -> SavedChat | None:
        """Let the next save copy the existing file first; return the copy, if there will be one."""
        if self.enabled and self._chat is not None and self._chat.path.exists():
            self._before = self._chat.before()
        return self._before

    def prepare(self, conversation: Conversation) -> None:
        """Write the session file, next to which the next answer is recorded; print failures."""
        path = None if self._chat is None else self._chat.path
        exists = path is not None and path.exists()
        # the record of an interrupted answer would be replaced by that of the next one
        is_current = path is not None and exists and not path_beside(path).exists()
        if self.enabled and self._before is None and not is_current:
            self._is_empty = not exists
            self._saving = self._worker.submit(self._save, conversation)
            self.settle()

    def save(self, conversation: Conversation) -> None:
        """Start to save in the background, unless there is nothing to save.

        The conversation must not be used before `settle` is called.
        """
        self.settle()
        is_saved = self._chat is not None and self._chat.path.exists()
        if self.enabled and (conversation.turns or is_saved):
            self._saving = self._worker.submit(self._save, conversation)

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

    def save_now(self, conversation: Conversation) -> None:
        """Save a conversation and wait for it; raise an InputError if that fails."""
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
                # Ctrl-C has to wait: the cache must not be freed while it is saved.
                with suppress(KeyboardInterrupt):
                    self._saving.result()
                    self._saving, self.failure = None, ""
            except (PyH2OError, OSError, MemoryError) as error:
                self._saving = None
                self.failure = f"this chat is not saved: {one_line(error)}"

    @contextmanager
    def moving(self, chat: SavedChat | None, *, leave: bool = True) -> Iterator[None]:
        """Switch to another session at the end of the body; an error leaves all unchanged.

        Args:
            chat: the session; None for a new one.
            leave: whether the current session has something saved.
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
        """Wait until all is saved, and unlock the session; remove it if it is empty."""
        self.settle()
        if self._is_empty and self._chat is not None:
            with suppress(OSError):  # it may not exist, as saving failed
                self._chat.remove()
            self._is_empty = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None
