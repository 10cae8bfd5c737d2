"""Copies of a saved session: of its file, and of the archive of recall that lies beside it.

No model is needed for that: what one file refers to in the other is the same in their copies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import SessionError
from ..system import archives
from ..system.files import copy_content, replacement
from .records import in_one_line
from .saved_conversation import KIND, SavedConversation
from .saved_story import KIND as STORY
from .saved_story import StoryHeader
from .session_file import (
    TEMPORARY,
    Session,
    damage_found,
    read_overview,
    read_session,
    write_session,
)


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
    session = read_session(source, read_overview(source).kind)
    with damage_found(source):
        text = _archive_of(session)
    found = None if text is None else archives.find(archives.of_session(source), text)
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


def _archive_of(session: Session) -> str | None:
    """Which file beside it is its archive's; None if it has none.

    Raises:
        ValueError: its header makes no sense.
    """
    if session.kind == KIND:
        return SavedConversation.of(session.header).archive
    if session.kind == STORY:
        return StoryHeader.of_header(session.header).archive
    raise ValueError(f"it is no session but a {in_one_line(session.kind)}")


def _copy_archive(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as old:
            _lock(old.fileno())
            mode = stat.S_IMODE(os.fstat(old.fileno()).st_mode)
            with replacement(target, prefix=TEMPORARY, mode=mode) as new:
                copy_content(old, new)
    except BlockingIOError as error:
        raise SessionError(
            f"the archive {source} is in use by another chat: leave that one first"
        ) from error
    except OSError as error:
        raise SessionError(
            f"cannot copy the archive {source} to {target}: {error.strerror or error}"
        ) from error


def _lock(file: int) -> None:
    """Keep models from writing to an archive while it is copied.

    Raises:
        BlockingIOError: one has it open.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system that has no locks
