"""The database of a user's chats, which `pyh2o chat` and the server share."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from ..errors import SessionError, SessionOpenError
from ..system.files import try_lock
from ..system.home import user_folder
from .database import Database

DATABASE = "chats.db"
# Suffix of session files of older versions.
OLDER = ".h2o"
MAX_TITLE = 48


def chats_folder() -> Path:
    """Return the folder of the chats: PYH2O_CHATS, or one in the user's data folder."""
    return user_folder("PYH2O_CHATS", platformdirs.user_data_dir, "chats")


def make_chats_folder() -> Path:
    """Return the folder, which is created if it does not exist, readable only by the user.

    Raises:
        OSError: it cannot be created.
    """
    folder = chats_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def open_chats() -> Database:
    """Open the user's database, after importing session files of older versions, once each.

    The old files are not changed. A damaged one is skipped; `Conversation.load` reports why.

    Raises:
        SessionError: the database cannot be used.
    """
    try:
        folder = make_chats_folder()
        names = sorted(path.name for path in folder.glob(f"*{OLDER}"))
    except OSError as error:
        raise SessionError(
            f"cannot write to {chats_folder()} ({error.strerror}): make it writable, or set "
            "PYH2O_CHATS to another folder"
        ) from None
    database = Database(folder / DATABASE)
    for name in names:
        if not database.is_imported(name):
            with contextlib.suppress(SessionError):
                _import(database, folder / name)
    return database


def _import(database: Database, path: Path) -> None:
    # imported here because it loads llama.cpp, which would delay `--help`
    from .older import read_older

    database.add(read_older(path))
    database.mark_imported(path.name)


@contextlib.contextmanager
def locked(database: Database, text: int) -> Iterator[None]:
    """Lock a text while it is open; the system releases the lock if the program is killed.

    Raises:
        SessionOpenError: the text is open elsewhere.
        SessionError: the folder is not writable.
    """
    path = database.lock_file(text)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise SessionError(
            f"cannot write to {path.parent} ({error.strerror}): make it writable"
        ) from None
    with file:
        if not try_lock(file):
            raise SessionOpenError(
                f"session {database.info(text).title} is open in another chat: close that one first"
            )
        database.settle(text)
        yield


def title_of(text: str) -> str:
    """Return the first words of a text as a title; "" if it has none."""
    words = " ".join(re.sub("<picture:[0-9a-f]{64}>", "", text[: 10 * MAX_TITLE]).split())
    return textwrap.shorten(words, MAX_TITLE, placeholder="") or words[:MAX_TITLE]
