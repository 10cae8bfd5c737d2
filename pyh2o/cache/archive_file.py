"""Storage of a text's archive: memory, or a file of the user's."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import NativeError, SettingsError
from .kv_cache import KVCache

# ID of the text of a file. States themselves contain the IDs of their pages.
_ID = bytes(16)


class ArchiveFile:
    """The storage of one archive.

    Args:
        kv: an empty cache with recall.
        path: the file; None for memory.

    Raises:
        SettingsError: the file cannot be used.

    Attributes:
        is_in_memory: whether states contain all of the archive.
    """

    def __init__(self, kv: KVCache, path: str | os.PathLike[str] | None) -> None:
        self._kv = kv
        self.is_in_memory = path is None
        if path is not None:
            try:
                kv.open_archive(Path(path).absolute(), _ID)
            except NativeError as error:
                raise SettingsError(f"recall_archive cannot be used: {error}") from error

    @property
    def error(self) -> str:
        """The error of the archive, in one line; "" for none."""
        return self._kv.archive_error()
