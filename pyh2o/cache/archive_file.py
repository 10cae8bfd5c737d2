"""Storage of a text's archive: memory, or a file, such as one next to a session.

The archive of the session NAME is NAME.archive. A new text writes to a temporary file, which
replaces NAME.archive when the session is saved. An archive error does not damage the session:
tokens that are missing in the archive cannot be recalled, and reading the text again rebuilds it.
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

# ID of a file without a session. States themselves contain the IDs of their pages.
_NO_SESSION = bytes(ID_BYTES)


class ArchiveFile:
    """The storage of one archive.

    Args:
        kv: an empty cache with recall.
        path: file to use until a session is saved or loaded; None for memory.

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
    def error(self) -> str:
        """The error of the archive, in one line; "" for none."""
        error = self._kv.archive_error()
        if error and self.is_of_session:
            return f"{error}; read the text again (--reread) to rebuild the archive"
        return error

    @property
    def is_in_memory(self) -> bool:
        """Whether states contain all of the archive."""
        return self._path is None and not self._is_own

    @property
    def is_of_session(self) -> bool:
        """Whether it is stored in a file next to a session."""
        return self._target is not None

    def begin_text(self) -> None:
        """Start a new text after the cache was emptied, unless a state is about to be loaded."""
        if self._awaits_state:
            self._awaits_state = False
        elif self._is_saved and self._target is not None:
            self._kv.close_archive()
            self._is_saved = False
            self._path = None
            with contextlib.suppress(NativeError):  # the archive stays in memory then
                self._begin(self._target)

    def await_state(self) -> None:
        """Prepare for loading a state that may need the file of a saved session.

        The text continues in a copy of that file, as it may diverge from the session.
        """
        session = self._target if self._is_saved and not self._awaits_state else None
        if session is not None and self._path is not None:
            self._kv.close_archive()  # otherwise its rows would be written to the copy again
            try:
                self._path = self._open_copy(self._path, session, self._id)
            except (NativeError, OSError):  # continues in a new file, with an error in `error`
                return
            self._is_saved = False
        self._awaits_state = True

    # ---------------------------------------------------------------------------------------------
    # Sessions
    # ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(self, session: str | Path, *, portable: bool = False) -> Iterator[str | None]:
        """Save the archive while the block writes a session file with a state.

        Args:
            session: the session file.
            portable: whether to put all of the archive into the state.

        Yields:
            the ID to pass to `open_saved`, or None if the state contains all of the archive.
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
        """Write all of the archive to a file for `target`; return False if that is impossible."""
        try:
            if self._path is None or self._target != target:
                self._begin(target)
        except NativeError:
            return False
        with contextlib.suppress(NativeError):  # in `error`; the session is saved nevertheless
            self._kv.flush_archive()
        return True

    def _begin(self, target: Path) -> None:
        """Continue in a new file.

        Raises:
            NativeError: the file cannot be written; nothing is changed.
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
        """Continue in a copy of a file, and return its path.

        Raises:
            NativeError, OSError: the copy cannot be written or opened; nothing is changed.
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
        """Open the archive of a session whose state is about to be loaded.

        After that, `error` reports rows that are missing.

        Args:
            session: the session file.
            text: the ID that `saving` yielded.
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
        """Continue with an empty archive in memory; the files of saved sessions are kept."""
        self._kv.close_archive()
        self.remove_unsaved()
        self._path = self._target = None
        self._is_own = self._is_saved = False

    def _open_found(self, found: Path, target: Path, text: bytes) -> bool:
        """Continue in the file of a session or a copy; return False if that is impossible."""
        try:
            self._kv.open_archive(found, text)
            self._is_saved = True
        except NativeError:
            # Another model may have it open: the next save then writes a separate file.
            try:
                found = self._open_copy(found, target, text)
            except NativeError:  # the file is damaged
                return False
        self._path, self._target, self._id = found, target, text
        return True

    def remove_unsaved(self) -> None:
        """Delete the file if no session was saved with it."""
        if self._path is not None and self._path != self._target and not self._is_saved:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
