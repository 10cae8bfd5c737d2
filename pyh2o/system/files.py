"""Atomic replacement of files, locks, and writes that survive a power cut."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import portalocker
from portalocker import LockFlags

SUFFIX = ".tmp"


@contextlib.contextmanager
def replacement(target: Path, *, prefix: str, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Write a new file that replaces `target` at the end, unless an exception is raised.

    Temporary files of writers that were killed are removed from the folder first.

    Args:
        prefix: of the temporary file's name, which ends with ".tmp".
        mode: permissions; None for the default of new files.
    """
    remove_unlocked(target.parent.glob(f"{prefix}*{SUFFIX}"))
    file, temporary = _create(target.parent, prefix)
    try:
        with file:
            if mode is not None:
                temporary.chmod(mode)
            yield file
            flush_to_disk(file)
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def flush_to_disk(file: IO[bytes]) -> None:
    """Make what was written survive a power cut."""
    file.flush()
    if sys.platform == "darwin":  # fsync() leaves data in the disk's own cache there
        import fcntl

        with contextlib.suppress(OSError):  # a disk that cannot flush its cache
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut, where the system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _create(folder: Path, prefix: str) -> tuple[IO[bytes], Path]:
    """Create and lock a file with a unique name."""
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}{SUFFIX}"
        file = path.open("xb")
        with contextlib.suppress(portalocker.LockException):  # a file system without locks
            portalocker.lock(file, LockFlags.EXCLUSIVE)
        # Another writer may have removed the file as a leftover before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, path
        file.close()


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Lock a file until it is closed; return False if another process holds the lock.

    A `shared` lock excludes writers only. File systems without locks count as locked.
    """
    kind = LockFlags.SHARED if shared else LockFlags.EXCLUSIVE
    try:
        portalocker.lock(file, kind | LockFlags.NON_BLOCKING)
    except portalocker.AlreadyLocked:
        return False
    except portalocker.LockException:
        pass
    return True


def remove_unlocked(paths: Iterable[Path]) -> None:
    """Remove the files that no running process has locked, as far as possible."""
    for path in paths:
        with contextlib.suppress(OSError, portalocker.LockException), path.open("rb") as file:
            portalocker.lock(file, LockFlags.EXCLUSIVE | LockFlags.NON_BLOCKING)
            path.unlink()
