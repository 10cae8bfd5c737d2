"""Where the archive of a model's text lies: in memory, or in a file, such as one beside a session.

The archive of the session NAME is NAME.archive. A new text gets a new file of another name, which
takes the place of NAME.archive once the session is saved that needs it: until then the saved one
has its own. Whatever is wrong with an archive, the session itself is none the worse: tokens that
are not in the archive are not found, no more, and who reads the text again builds it anew.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import NativeError, SettingsError
from ..system.archives import ID_BYTES, find, new_name, of_session, remove_leftovers
from .kv_cache import KVCache

# Of a file that belongs to no session: states say themselves which pages are theirs.
_NO_SESSION = bytes(ID_BYTES)


class ArchiveFile:
    """The place of an archive.

    Args:
        kv: of a context that keeps an archive, without text.
        path: a file for it from the start, until a session is saved or loaded; None for memory.

    Raises:
        SettingsError: the file cannot be used.
    """

    def __init__(self, kv: KVCache, path: str | os.PathLike[str] | None) -> None:
        self._kv = kv
        self._is_own = path is not None
        self._path: Path | None = None
        self._target: Path | None = None
        self._id = _NO_SESSION
        self._is_saved = False  # a saved session needs the file
        self._awaits_state = False
        if path is not None:
            try:
                kv.open_archive(Path(path).absolute(), _NO_SESSION)
            except NativeError as error:
                raise SettingsError(f"recall_archive cannot be used: {error}") from error

    @property
    def trouble(self) -> str:
        """What is wrong with the archive, in one line; "" if nothing is."""
        trouble = self._kv.archive_trouble()
        if trouble and self.is_of_session:
            return f"{trouble}; have the text read again (--reread) to build it anew"
        return trouble

    @property
    def is_in_memory(self) -> bool:
        """Whether states hold all of it."""
        return self._path is None and not self._is_own

    @property
    def is_of_session(self) -> bool:
        """Whether it lies in a file beside a session."""
        return self._target is not None

    def begin_text(self) -> None:
        """The cache has been emptied: what comes is another text, unless its state is loaded."""
        if self._awaits_state:
            self._awaits_state = False
        elif self._is_saved and self._target is not None:
            self._kv.close_archive()
            self._is_saved = False
            self._path = None
            with contextlib.suppress(NativeError):  # then it goes on in memory
                self._begin(self._target)

    def await_state(self) -> None:
        """A state is loaded next that may need the file: what a saved session has stays as it is.

        The text goes on in a copy, since it may go on otherwise than the session.
        """
        session = self._target if self._is_saved and not self._awaits_state else None
        if session is not None and self._path is not None:
            self._kv.close_archive()  # or all that is held would be written to the copy once more
            try:
                self._path = self._open_copy(self._path, session, self._id)
            except (NativeError, OSError):  # then it goes on in a new file, and `trouble` says so
                return
            self._is_saved = False
        self._awaits_state = True

    # ---------------------------------------------------------------------------------------------
    # Sessions
    # ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(self, session: str | Path, *, portable: bool = False) -> Iterator[str | None]:
        """While a state is written that goes into a session file, and that file itself.

        Args:
            session: its file.
            portable: the state has to hold all of the archive.

        Yields:
            what the session has to say for `open_saved`, or None if its state holds all.
        """
        target = of_session(session)
        if portable or not self._prepare(target):
            self._kv.archive_in_states(True)
            try:
                yield None
            finally:
                self._kv.archive_in_states(False)
            return
        yield self._id.hex()
        assert self._path is not None
        if self._path != target:
            os.replace(self._path, target)
            self._path = target
        self._is_saved = True
        remove_leftovers(target)

    def _prepare(self, target: Path) -> bool:
        """Have all in the file that it will be; whether that was possible."""
        try:
            if self._path is None or self._target != target:
                self._begin(target)
        except NativeError:
            return False
        with contextlib.suppress(NativeError):  # `trouble` says so, and the session is saved
            self._kv.flush_archive()
        return True

    def _begin(self, target: Path) -> None:
        """Go on in a new file.

        Raises:
            NativeError: it cannot be written; all stays as it was.
        """
        path, text = new_name(target), secrets.token_bytes(ID_BYTES)
        self._open(path, text)
        self._path, self._target, self._id, self._is_saved = path, target, text, False

    def _open(self, path: Path, text: bytes) -> None:
        try:
            self._kv.open_archive(path, text)
        except NativeError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        self.remove_unsaved()

    def _open_copy(self, file: Path, target: Path, text: bytes) -> Path:
        """Go on in a copy of a file, under a new name, and return that.

        Raises:
            NativeError, OSError: it cannot be written or opened; all stays as it was.
        """
        copied = new_name(target)
        try:
            shutil.copyfile(file, copied)
        except OSError:
            with contextlib.suppress(OSError):
                copied.unlink(missing_ok=True)
            raise
        self._open(copied, text)
        return copied

    def open_saved(self, session: str | Path, text: str | None) -> None:
        """Have the archive of a session, whose state is loaded next.

        What is missing of it is said in `trouble` when the state is loaded.

        Args:
            session: its file.
            text: what `saving` gave.
        """
        self.leave()
        self._awaits_state = True
        if text is None:
            return
        target = of_session(session)
        found = find(target, text)
        with contextlib.suppress(NativeError, OSError):
            if found is None or not self._open_found(found, target, bytes.fromhex(text)):
                self._begin(target)

    def leave(self) -> None:
        """Go on with an empty archive in memory; what a saved session needs stays where it is."""
        self._kv.close_archive()
        self.remove_unsaved()
        self._path = self._target = None
        self._is_own = self._is_saved = False

    def _open_found(self, found: Path, target: Path, text: bytes) -> bool:
        """Go on in the file of a session, or a copy of it; whether that was possible."""
        try:
            self._kv.open_archive(found, text)
            self._is_saved = True
        except NativeError:
            # Another model has it open: the session is saved anew with a file of its own.
            try:
                found = self._open_copy(found, target, text)
            except NativeError:  # it is damaged
                return False
        self._path, self._target, self._id = found, target, text
        return True

    def remove_unsaved(self) -> None:
        """Remove a file that no session was saved with."""
        if self._path is not None and self._path != self._target and not self._is_saved:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
