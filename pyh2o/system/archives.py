"""Names of the archive files of sessions."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from pathlib import Path

from .files import remove_unlocked

SUFFIX = ".archive"
_NEW = ".new"

# Offset and size of the text ID in the file (native/src/recall/h2o-archive-file.cpp).
_ID_OFFSET, ID_BYTES = 40, 16


def of_session(session: str | Path) -> Path:
    """Return the path of the archive file of a session, which may not exist."""
    path = Path(os.path.realpath(session))
    return path.with_name(path.name + SUFFIX)


def remove_of_session(session: str | Path) -> None:
    target = of_session(session)
    target.unlink(missing_ok=True)
    remove_leftovers(target)


def give_to(session: str | Path, other: str | Path) -> None:
    """Link or copy the archive of a session for another, new session.

    A program that was killed right after it saved the session has left a temporary name.
    """
    source, target = of_session(session), of_session(other)
    for path in filter(Path.is_file, [source, *_new_files(source)]):
        given = target.with_name(f"{target.name}{path.name.removeprefix(source.name)}")
        given.unlink(missing_ok=True)  # of a removed session
        try:
            os.link(path, given)
        except OSError:  # a file system without hard links
            shutil.copy(path, given)


def new_name(target: Path) -> Path:
    """Return a temporary name for an archive, until its session is saved."""
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}{_NEW}")


def _new_files(target: Path) -> list[Path]:
    return sorted(target.parent.glob(f"{glob.escape(target.name)}.*{_NEW}"))


def find(target: Path, text: str) -> Path | None:
    """Return the file with the archive of a text ID, `target` or a temporary name; or None."""
    return next((path for path in [target, *_new_files(target)] if _id_of(path) == text), None)


def _id_of(path: Path) -> str:
    """Return the text ID in a file, in hexadecimal digits; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(_ID_OFFSET)
            return file.read(ID_BYTES).hex()
    except OSError:
        return ""


def remove_leftovers(target: Path) -> None:
    """Remove temporary names of an archive that no running process has open."""
    remove_unlocked(_new_files(target))
