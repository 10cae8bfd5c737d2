"""Session files with changed members and valid checksums."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER, TOKENS, KV = "header.json", "tokens.bin", "kv.bin"


def members_of(data: bytes) -> dict[str, bytes]:
    """Return the members of a session file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def session_of(members: dict[str, bytes]) -> bytes:
    """Write a session file with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()


def with_sums(members: dict[str, bytes]) -> dict[str, bytes]:
    """Return the members with updated checksums in the header, if that is a JSON object."""
    try:
        about = json.loads(members[HEADER])
    except (KeyError, ValueError, RecursionError):
        return members
    if not isinstance(about, dict):
        return members
    about["crc32"] = {name: zlib.crc32(members[name]) for name in members.keys() & {TOKENS, KV}}
    return {**members, HEADER: json.dumps(about).encode()}


def change_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a session file."""
    members = members_of(file.read_bytes())
    about = json.loads(members[HEADER])
    change(about["header"])
    file.write_bytes(session_of({**members, HEADER: json.dumps(about).encode()}))
