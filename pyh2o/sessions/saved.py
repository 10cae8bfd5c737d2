"""Where sessions are saved by name: a folder with one file for each, open in one place at a time.

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
LONGEST_NAME = 100
# At the end of the name of what a session was before it was read again.
BEFORE = ".before"
# Of the name that a session gets from its first words; a number and BEFORE have room behind it.
MOST_LETTERS, MOST_BYTES = 48, 80


def chats_folder() -> Path:
    """The folder of the saved chats: PYH2O_CHATS, or one in the user's data folder."""
    return user_folder("PYH2O_CHATS", platformdirs.user_data_dir, "chats")


def make_chats_folder() -> Path:
    """The folder, created if it is not there; what people tell a model is for their eyes only.

    Raises:
        OSError: it cannot be created.
    """
    folder = chats_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class SavedChat:
    """A chat that is saved under a name, or will be.

    Raises:
        SessionError: a name that cannot be that of a file everywhere.
    """

    name: str

    def __post_init__(self) -> None:
        name = self.name
        if (
            not name
            or len(os.fsencode(name)) > LONGEST_NAME
            or name[0] in ".-"
            or name != name.strip()
        ):
            wrong = f"1 to {LONGEST_NAME} characters, with no dot, dash or space at the start"
        elif not all(map(_fits_names, name)):
            wrong = "letters, digits, dashes, dots, underscores and spaces"
        else:
            return
        raise SessionError(f"{name!r} cannot be the name of a session: a name has {wrong}")

    @property
    def path(self) -> Path:
        """Its session file."""
        return chats_folder() / f"{self.name}{SUFFIX}"

    @property
    def n_bytes(self) -> int:
        """Bytes that its file and its archive take."""
        files = (self.path, archives.of_session(self.path))
        return sum(file.stat().st_size for file in files if file.exists())

    def remove(self) -> None:
        """Remove it for good, with its archive.

        Raises:
            OSError: it cannot be removed.
        """
        self.path.unlink()
        path_beside(self.path).unlink(missing_ok=True)
        archives.remove_of_session(self.path)

    def rename(self, new: SavedChat) -> None:
        """Give it another name, which no other chat has; its archive goes along.

        Raises:
            OSError: it cannot be renamed.
        """
        # The archive has both names for a moment: a session never lies without it.
        archives.give_to(self.path, new.path)
        self.path.rename(new.path)
        with contextlib.suppress(FileNotFoundError):
            path_beside(self.path).rename(path_beside(new.path))
        archives.remove_of_session(self.path)

    def before(self) -> SavedChat:
        """A name for what it is before its text is read again, that no other one has."""
        return _unused(f"{self.name}{BEFORE}")

    @property
    def lock_path(self) -> Path:
        """A file of its own that is locked: the session file is another one after each save."""
        return chats_folder() / f".{self.name}.lock"


def saved_chats() -> list[SavedChat]:
    """All chats and stories that are saved, the one last changed first.

    Raises:
        OSError: the folder cannot be read, such as one that root has made; glob() finds it empty.
    """
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(chats_folder())  # noqa: PTH208
    found = []
    for name in names:
        if name.startswith(".") or not name.endswith(SUFFIX):
            continue
        with contextlib.suppress(OSError, SessionError):  # removed since the listing, or not ours
            chat = SavedChat(name.removesuffix(SUFFIX))
            found.append((chat.path.stat().st_mtime_ns, chat))
    return [chat for _, chat in sorted(found, key=lambda each: each[0], reverse=True)]


def saved_conversations() -> Iterator[SavedChat]:
    """Those of them that are no stories."""
    for chat in saved_chats():
        with contextlib.suppress(SessionError):  # which is said when it is opened
            if read_session(chat.path, state=False).kind == "story":
                continue
        yield chat


def new_chat(said: str = "") -> SavedChat:
    """A chat with a name that no other chat has: of its first words, or of the time without any."""
    return _unused(name_of(said) or time.strftime("%Y-%m-%d-%H%M%S"))


def name_of(text: str) -> str:
    """The first words of a text as a name; "" if it has no letters and digits."""
    text = re.sub("['\N{RIGHT SINGLE QUOTATION MARK}]", "", text[: 10 * MOST_LETTERS])
    words = "".join(sign if _fits_names(sign) else " " for sign in text).strip("-_. ")
    name = textwrap.shorten(words, MOST_LETTERS, placeholder="") or words[:MOST_LETTERS]
    while len(os.fsencode(name)) > MOST_BYTES:
        name = name[:-1]
    return name.strip("-_. ")


def _fits_names(sign: str) -> bool:
    # a mark is part of a letter, as in Hindi and Thai
    return sign.isalnum() or sign in "-_. " or unicodedata.category(sign)[0] == "M"


def _unused(name: str) -> SavedChat:
    """A chat of this name, or NAME-2, NAME-3 ... where there are others."""
    chat, number = SavedChat(name), 1
    while chat.path.exists() or chat.lock_path.exists():
        number += 1
        chat = SavedChat(f"{name}-{number}")
    return chat


class ChatLock:
    """Holds a chat as long as it is open here; the system lets go of it if the program is killed.

    Raises:
        SessionOpenError: the chat is open elsewhere.
        SessionError: the folder cannot be written.
    """

    def __init__(self, chat: SavedChat) -> None:
        self._path = chat.lock_path
        try:
            make_chats_folder()
            self._file = self._locked()
        except OSError as error:
            raise SessionError(
                f"{chats_folder()} cannot be used ({error.strerror}): make it writable, set "
                "PYH2O_CHATS to another folder, or give --no-save"
            ) from None
        if self._file is None:
            raise SessionOpenError(
                f"session {chat.name} is open in another chat: leave that one first, or give "
                "another --session"
            )

    def _locked(self) -> IO[bytes] | None:
        """Return the locked file; None if another chat holds it."""
        while True:
            with ExitStack() as stack:
                file = stack.enter_context(open(self._path, "ab", opener=_private))
                if not try_lock(file):
                    return None
                # another chat that has just ended may have removed the file that we hold
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                        stack.pop_all()
                        return file

    def close(self) -> None:
        """Let other chats have it."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._file is not None:
            self._file.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def is_open(chat: SavedChat) -> bool:
    """Whether a chat is open somewhere, here or in another program."""
    try:
        ChatLock(chat).close()
    except SessionOpenError:
        return True
    return False


def copy_session(source: Path, target: Path) -> bool:
    """Copy a saved conversation or story that no program goes on with, and its archive.

    No model is needed for that: what one file refers to in the other is the same in their copies.
    The session comes last, so that there is no copy before it is whole. Checksums say whether it
    is; those of the archive's pages are looked at by the model that opens it.

    Args:
        source: its session file.
        target: that of the copy; neither this file nor an archive beside it should exist.

    Returns:
        False if it should have an archive, which is not there.

    Raises:
        SessionError: it is damaged, its archive is in use, or there is no room; nothing is left of
            the copy.
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
                    f"the archive {found} is in use by another chat: leave that one first"
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
