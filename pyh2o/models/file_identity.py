"""Identity of a model file, without loading it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Headers of today's models, with vocabulary and tensor shapes, are shorter than this. Their hash
# identifies a model without reading gigabytes.
HEADER_BYTES = 16 * 2**20


@dataclass(frozen=True)
class FileIdentity:
    """A file at the time of `identify`, with the SHA-256 of its header."""

    path: Path
    bytes: int
    sha256: str

    def record(self) -> dict[str, Any]:
        """Return name, size and hash, for a session or a result."""
        return {"file": self.path.name, "bytes": self.bytes, "sha256": self.sha256}


def identify(path: str | os.PathLike[str]) -> FileIdentity:
    path = Path(path).absolute()
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        size = file.seek(0, os.SEEK_END)
    return FileIdentity(path, size, hashlib.sha256(header).hexdigest())
