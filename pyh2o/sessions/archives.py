"""The archive of recall that a session is saved with: a file beside its own (see `ArchiveFile`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..llama import Llama
from .session_file import Session


@contextlib.contextmanager
def archive_saved(path: str | Path, llm: Llama, *, portable: bool = False) -> Iterator[str | None]:
    """While a session is saved in a file, from before its state is taken (see `ArchiveFile`).

    Yields:
        what its header says of the archive.
    """
    if llm.archive is None:
        yield None
        return
    with llm.archive.saving(path, portable=portable) as text:
        yield text


def open_archive(session: Session, llm: Llama, text: str | None) -> None:
    """Have the archive that a session was saved with, before its state is loaded.

    Args:
        session: that was read from a file.
        llm: the model.
        text: what the header says of the archive.
    """
    if llm.archive is not None:
        llm.archive.open_saved(session.path or "", text if session.path else None)
