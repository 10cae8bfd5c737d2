"""The folder of saved sessions, a file each; a lock keeps a session from being open twice.

`pyh2o chat` and the server share the folder and the locks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import textwrap
import time
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from ..errors import SessionError, SessionOpenError
from ..system import archives
from ..system.files import replacement, try_lock
from ..system.home import user_folder
from .session_file import TEMPORARY, read_session, write_session
from .unfinished import path_beside

SUFFIX = ".h2o"
MAX_NAME_BYTES = 100
# Name suffix of a copy from before a session was read again.
BEFORE = ".before"
# Maximum length of a generated name, to which a number and BEFORE may be added.
MAX_LETTERS, MAX_BYTES = 48, 80


def chats_folder() -> Path:
    """Return the folder of saved sessions: PYH2O_CHATS, or one in the user's data folder."""
    return user_folder("PYH2O_CHATS", platformdirs.user_data_dir, "chats")


def make_chats_folder() -> Path:
    """Return the folder, which is created if it does not exist, readable only by the user.

    Raises:
        OSError: it cannot be created.
    """
    folder = chats_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class SavedChat:
    """A session name, whose file may exist.

    Raises:
        SessionError: the name is not a valid file name on all systems.
    """

    name: str

    def __post_init__(self) -> None:
        name = self.name
        if (
            not name
            or len(os.fsencode(name)) > MAX_NAME_BYTES
            or name[0] in ".-"
            or name != name.strip()
        ):
            rule = f"1 to {MAX_NAME_BYTES} characters, with no dot, dash or space at the start"
        elif not all(map(_fits_names, name)):
            rule = "letters, digits, dashes, dots, underscores and spaces"
        else:
            return
        raise SessionError(f"{name!r} is not a valid session name: a name has {rule}")

    @property
    def path(self) -> Path:
        """The session file."""
        return chats_folder() / f"{self.name}{SUFFIX}"

    @property
    def n_bytes(self) -> int:
        """Size of the session file and its archive."""
        files = (self.path, archives.of_session(self.path))
        return sum(file.stat().st_size for file in files if file.exists())

    def remove(self) -> None:
        """Delete the session file and its archive.

        Raises:
            OSError: a file cannot be deleted.
        """
        self.path.unlink()
        path_beside(self.path).unlink(missing_ok=True)
        archives.remove_of_session(self.path)

    def rename(self, new: SavedChat) -> None:
        """Rename the session and its archive to an unused name.

        Raises:
            OSError: a file cannot be renamed.
        """
        # The archive temporarily has both names, so the session always has its archive.
        archives.give_to(self.path, new.path)
        self.path.rename(new.path)
        with contextlib.suppress(FileNotFoundError):
            path_beside(self.path).rename(path_beside(new.path))
        archives.remove_of_session(self.path)

    def before(self) -> SavedChat:
        """Return an unused name for a copy from before the text is read again."""
        return _unused(f"{self.name}{BEFORE}")

    @property
    def lock_path(self) -> Path:
        """The lock file; the session file itself is replaced at each save."""
        return chats_folder() / f".{self.name}.lock"


def saved_chats() -> list[SavedChat]:
    """Return all saved sessions, the most recently changed first.

    Raises:
        OSError: the folder cannot be read, for example if root created it.
    """
    names: list[str] = []  # glob() would ignore an unreadable folder
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(chats_folder())  # noqa: PTH208
    found = []
    for name in names:
        if name.startswith(".") or not name.endswith(SUFFIX):
            continue
        with contextlib.suppress(OSError, SessionError):  # deleted meanwhile, or a foreign file
            chat = SavedChat(name.removesuffix(SUFFIX))
            found.append((chat.path.stat().st_mtime_ns, chat))
    return [chat for _, chat in sorted(found, key=lambda each: each[0], reverse=True)]


def saved_conversations() -> Iterator[SavedChat]:
    """Yield all saved sessions except stories."""
    for chat in saved_chats():
        with contextlib.suppress(SessionError):  # reported when it is opened
            if read_session(chat.path, state=False).kind == "story":
                continue
        yield chat


def new_chat(first_words: str = "") -> SavedChat:
    """Return an unused session name from a chat's first words, or without any from the time."""
    return _unused(name_of(first_words) or time.strftime("%Y-%m-%d-%H%M%S"))


def name_of(text: str) -> str:
    """Return the first words of a text as a name; "" if it has no letters or digits."""
    text = re.sub("['\N{RIGHT SINGLE QUOTATION MARK}]", "", text[: 10 * MAX_LETTERS])
    words = "".join(sign if _fits_names(sign) else " " for sign in text).strip("-_. ")
    name = textwrap.shorten(words, MAX_LETTERS, placeholder="") or words[:MAX_LETTERS]
    while len(os.fsencode(name)) > MAX_BYTES:
        name = name[:-1]
    return name.strip("-_. ")


def _fits_names(sign: str) -> bool:
    # a mark is part of a letter, as in Hindi and Thai
    return sign.isalnum() or sign in "-_. " or unicodedata.category(sign)[0] == "M"


def _unused(name: str) -> SavedChat:
    """Return a session of this name, or of NAME-2, NAME-3 ... if it exists."""
    chat, number = SavedChat(name), 1
    while chat.path.exists() or chat.lock_path.exists():
        number += 1
        chat = SavedChat(f"{name}-{number}")
    return chat


class ChatLock:
    """A lock on an open session, which the system releases if the program is killed.

    Raises:
        SessionOpenError: the session is open elsewhere.
        SessionError: the folder is not writable.
    """

    def __init__(self, chat: SavedChat) -> None:
        self._path = chat.lock_path
        try:
            make_chats_folder()
            self._file = self._locked()
        except OSError as error:
            raise SessionError(
                f"cannot write to {chats_folder()} ({error.strerror}): make it writable, set "
                "PYH2O_CHATS to another folder, or give --no-save"
            ) from None
        if self._file is None:
            raise SessionOpenError(
                f"session {chat.name} is open in another chat: close that one first, or give "
                "another --session"
            )

    def _locked(self) -> IO[bytes] | None:
        """Return the locked file; None if another chat holds it."""
        while True:
            with ExitStack() as stack:
                file = stack.enter_context(open(self._path, "ab", opener=_private))
                if not try_lock(file):
                    return None
                # a chat that has just ended may have removed the locked file
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                        stack.pop_all()
                        return file

    def close(self) -> None:
        """Release the lock."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._file is not None:
            self._file.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_open(chat: SavedChat) -> bool:
    """Return whether a session is open in this or another program."""
    try:
        ChatLock(chat).close()
    except SessionOpenError:
        return True
    return False


def copy_session(source: Path, target: Path) -> bool:
    """Copy a session that is not open, with its archive, without a model.

    The session file is written last, so that an incomplete copy does not appear. Its checksums are
    checked; those of the archive's pages are checked when a model opens it.

    Args:
        source: the session file.
        target: the new session file; neither it nor an archive next to it should exist.

    Returns:
        False if the archive of the session is missing.

    Raises:
        SessionError: the session is damaged, its archive is in use, or the disk is full; an
            incomplete copy is removed.
    """
    session, copied = read_session(source), archives.of_session(target)
    text = session.header.get("archive")
    found = None if text is None else archives.find(archives.of_session(source), str(text))
    if found is None:
        write_session(target, session)
        return text is None
    try:
        with found.open("rb") as old:
            if not try_lock(old, shared=True):
                raise SessionError(
                    f"the archive {found} is in use by another chat: close that one first"
                )
            mode = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
            with replacement(copied, prefix=TEMPORARY, mode=mode) as new:
                shutil.copyfileobj(old, new)
    except OSError as error:
        raise SessionError(
            f"cannot copy the archive {found} to {copied}: {error.strerror or error}"
        ) from error
    try:
        write_session(target, session)
    except BaseException:
        with contextlib.suppress(OSError):
            copied.unlink(missing_ok=True)
        raise
    return True
