"""Writing files so that a crash or a full disk leaves the old one whole."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

SUFFIX = ".tmp"


@contextlib.contextmanager
def replacement(target: Path, *, prefix: str, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `target` at the end, unless something goes wrong.

    What was left of such files by writers that were killed is removed from the folder.

    Args:
        target: which may exist.
        prefix: how the name begins until then; it ends with ".tmp".
        mode: permissions; None for those of any new file.
    """
    remove_unlocked(target.parent.glob(f"{prefix}*{SUFFIX}"))
    with _new_file(target.parent, prefix) as (file, temporary):
        if mode is not None:
            temporary.chmod(mode)
        yield file
        flush_to_disk(file)
        os.replace(temporary, target)
    sync_folder(target.parent)


def flush_to_disk(file: IO[bytes]) -> None:
    """Make what was written survive a power cut."""
    file.flush()
    # fsync() of macOS leaves it in the memory of the disk; not every disk can do more
    if (all_of_it := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, all_of_it)
            return
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make new and other names in it survive a power cut, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _new_file(folder: Path, prefix: str) -> Iterator[tuple[IO[bytes], Path]]:
    """A locked file of a name of its own, which is removed if something goes wrong."""
    file, path = _create(folder, prefix)
    try:
        with file:
            yield file, path
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _create(folder: Path, prefix: str) -> tuple[IO[bytes], Path]:
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}{SUFFIX}"
        file = path.open("xb")
        with contextlib.suppress(OSError):  # a file system that has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another writer may have removed it as a leftover before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, path
        file.close()


def try_lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Keep others off a file until it is closed, also by a crash; `shared`: those that write it.

    Returns:
        False if another process has it. On a file system that has no locks nobody has.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_unlocked(paths: Iterable[Path], older_than: float = -math.inf) -> None:
    """Remove files that no living process is writing: it would hold their lock.

    Args:
        paths: of them; what cannot be removed stays.
        older_than: seconds since they were changed.
    """
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            if time.time() - path.stat().st_mtime > older_than:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
