"""Session files with other members, whose check sums are right."""

from __future__ import annotations

import io
import zipfile

HEADER, TOKENS, KV = "header.json", "tokens.npy", "kv.bin"


def members_of(data: bytes) -> dict[str, bytes]:
    """What is in a session file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def session_of(members: dict[str, bytes]) -> bytes:
    """A session file with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()
