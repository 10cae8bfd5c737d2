"""Writing files so that a crash or a full disk leaves the old one whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacement(target: Path, *, prefix: str, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `target` at the end, unless something goes wrong.

    Args:
        target: which may exist.
        prefix: how the name begins until then; it ends with ".tmp".
        mode: permissions; None for those of any new file.
    """
    temporary = target.with_name(f"{prefix}{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                temporary.chmod(mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
