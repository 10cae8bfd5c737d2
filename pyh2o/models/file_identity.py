"""What tells a model file from others, without loading it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The header of a GGUF file, its vocabulary and the shapes of all tensors, is shorter than this in
# today's models; a hash of it tells models apart without reading gigabytes.
HEADER_BYTES = 16 * 2**20


@dataclass(frozen=True)
class FileIdentity:
    """A file as it was when somebody looked.

    Attributes:
        path: of it, absolute.
        bytes: its size.
        sha256: hash of its header, in hexadecimal digits.
    """

    path: Path
    bytes: int
    sha256: str

    def record(self) -> dict[str, Any]:
        """For a session or a result: the name of the file, its size and its hash."""
        return {"file": self.path.name, "bytes": self.bytes, "sha256": self.sha256}


def identify(path: str | os.PathLike[str]) -> FileIdentity:
    """Look at a file.

    Raises:
        OSError: it cannot be read.
    """
    path = Path(path).absolute()
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        size = file.seek(0, os.SEEK_END)
    return FileIdentity(path, size, hashlib.sha256(header).hexdigest())
