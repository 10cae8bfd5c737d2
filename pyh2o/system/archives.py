"""Names of the files in which the archives of sessions lie."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from pathlib import Path

from .files import remove_unlocked

SUFFIX = ".archive"
_NEW = ".new"

# Where such a file says which text it is of (native/src/recall/h2o-archive-file.cpp).
_ID_OFFSET, ID_BYTES = 40, 16


def of_session(session: str | Path) -> Path:
    """The file that the archive of a session lies in, if it has one."""
    path = Path(os.path.realpath(session))
    return path.with_name(path.name + SUFFIX)


def remove_of_session(session: str | Path) -> None:
    """Remove the archive of a session.

    Raises:
        OSError: it cannot be removed.
    """
    target = of_session(session)
    target.unlink(missing_ok=True)
    remove_leftovers(target)


def give_to(session: str | Path, other: str | Path) -> None:
    """Let the archive of a session be that of another one, too, which is not there yet.

    A program that was killed right after the session was saved has left it another name.

    Raises:
        OSError: that failed.
    """
    source, target = of_session(session), of_session(other)
    for path in filter(Path.is_file, [source, *_new_files(source)]):
        given = target.with_name(f"{target.name}{path.name.removeprefix(source.name)}")
        given.unlink(missing_ok=True)  # of a session that somebody has removed without it
        try:
            os.link(path, given)
        except OSError:  # a file system without hard links
            shutil.copy(path, given)


def new_name(target: Path) -> Path:
    """A name for a file until a session is saved that needs it."""
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}{_NEW}")


def _new_files(target: Path) -> list[Path]:
    return sorted(target.parent.glob(f"{glob.escape(target.name)}.*{_NEW}"))


def find(target: Path, text: str) -> Path | None:
    """The file that has the archive of a session, or None.

    A program that was killed right after the session was saved has left it the other name.

    Args:
        target: where it lies otherwise (`of_session`).
        text: which it is of, as the session says it.
    """
    return next((path for path in [target, *_new_files(target)] if _id_of(path) == text), None)


def _id_of(path: Path) -> str:
    """Of which text a file says it is, in hexadecimal digits; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(_ID_OFFSET)
            return file.read(ID_BYTES).hex()
    except OSError:
        return ""


def remove_leftovers(target: Path) -> None:
    """Remove other names of an archive that no living process has open."""
    remove_unlocked(_new_files(target))
