"""Session files with other members, whose check sums in the archive are right."""

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


def with_sums(members: dict[str, bytes]) -> dict[str, bytes]:
    """The members, with the sums of the others in the header, if that is a JSON object."""
    try:
        about = json.loads(members[HEADER])
    except (KeyError, ValueError, RecursionError):
        return members
    if not isinstance(about, dict):
        return members
    about["crc32"] = {name: zlib.crc32(members[name]) for name in members.keys() & {TOKENS, KV}}
    return {**members, HEADER: json.dumps(about).encode()}


def change_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a session file says of its text."""
    members = members_of(file.read_bytes())
    about = json.loads(members[HEADER])
    change(about["header"])
    file.write_bytes(session_of({**members, HEADER: json.dumps(about).encode()}))
