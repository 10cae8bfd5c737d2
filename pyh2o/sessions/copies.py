"""Copies of a saved session: of its file, and of the archive of recall that lies beside it.

No model is needed for that: what one file refers to in the other is the same in their copies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import SessionError
from ..system import archives
from ..system.files import replacement, try_lock
from .session_file import TEMPORARY, read_session, write_session


@dataclass(frozen=True)
class CopiedSession:
    """What was written.

    Attributes:
        session: its file.
        archive: the file beside it; None if there is none.
        lacks_archive: whether there should have been one.
    """

    session: Path
    archive: Path | None
    lacks_archive: bool


def copy_session(source: Path, target: Path) -> CopiedSession:
    """Copy a saved conversation or story that no program goes on with.

    The session comes last, so that there is no copy before it is whole. Checksums say whether the
    session is; those of the archive's pages are looked at by the model that opens it.

    Args:
        source: its session file.
        target: that of the copy; neither this file nor an archive beside it should exist.

    Raises:
        SessionError: it is damaged, its archive is in use, or there is no room; nothing is left of
            the copy.
    """
    session = read_session(source)
    text = session.header.get("archive")
    found = None if text is None else archives.find(archives.of_session(source), str(text))
    copied = None if found is None else archives.of_session(target)
    try:
        if found is not None and copied is not None:
            _copy_archive(found, copied)
        write_session(target, session)
    except BaseException:
        if copied is not None:
            with contextlib.suppress(OSError):
                copied.unlink(missing_ok=True)
        raise
    return CopiedSession(target, copied, text is not None and found is None)


def _copy_archive(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as old:
            if not try_lock(old, shared=True):
                raise SessionError(
                    f"the archive {source} is in use by another chat: leave that one first"
                )
            mode = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
            with replacement(target, prefix=TEMPORARY, mode=mode) as new:
                shutil.copyfileobj(old, new)
    except OSError as error:
        raise SessionError(
            f"cannot copy the archive {source} to {target}: {error.strerror or error}"
        ) from error
