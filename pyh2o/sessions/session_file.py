"""Session files: everything needed to continue a text in another process, in one file.

A file is a ZIP archive of stored members:

* `header.json`: format, version and kind, the model's identity, the settings, fields of the kind of
  session, and the CRC-32 of the next two members;
* `tokens.bin`: the tokens of the text, little-endian int32 [n_tokens];
* `kv.bin`: the state of the KV cache, from `Llama.kv_state`;
* `pictures/HASH`: the file of each picture in the text.

ZIP's CRC-32 of each member detects damage; those in the header detect members of different
sessions. A new file is written next to the old one and replaces it when it is complete, so a crash
or a full disk does not damage the old one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import SessionError
from ..system.files import replacement
from .records import in_one_line
from .unfinished import path_beside, pictures_in, read_record, with_unfinished

FORMAT = "pyh2o session"
FORMAT_VERSION = 1

# Name prefix of incomplete files.
TEMPORARY = ".pyh2o-session-"

_HEADER, _TOKENS, _KV, _PICTURES = "header.json", "tokens.bin", "kv.bin", "pictures/"
_SUMS = "crc32"
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True)
class Session:
    """The contents of a session file.

    Attributes:
        kind: "conversation" or "story".
        header: fields of a `SessionHeader`, as JSON values.
        tokens: tokens of the text; [n_tokens].
        kv: state of the KV cache; empty if it was not read.
        pictures: files of pictures in the text, by their hashes; empty if the state was not read.
    """

    kind: str
    header: dict[str, Any]
    tokens: list[int]
    kv: bytes | mmap
    pictures: Mapping[str, bytes] = field(default_factory=dict)


def write_session(path: str | Path, session: Session) -> None:
    """Write a session file; if that fails, an old file is unchanged.

    An existing file keeps its permissions. If the path is a link, its target is replaced.

    Raises:
        SessionError: the file cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))
        with replacement(target, prefix=TEMPORARY, mode=_mode(path, target)) as file:
            _write_archive(file, session)
        path_beside(path).unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise SessionError(
            f"cannot save the session to {path}: {reason}; an existing file is unchanged"
        ) from error


def _mode(path: str | Path, target: Path) -> int:
    """Return the permissions of the existing file; a new file is private."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return 0o600
    if not stat.S_ISREG(mode):
        raise SessionError(
            f"cannot save the session to {path}: it is not a regular file; give another name"
        )
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is write-protected")
    return stat.S_IMODE(mode)


def _write_archive(file: IO[bytes], session: Session) -> None:
    tokens = np.asarray(session.tokens, _TOKEN).tobytes()
    about = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "kind": session.kind,
        "header": session.header,
        _SUMS: {_TOKENS: zlib.crc32(tokens), _KV: zlib.crc32(session.kv)},
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        # An explicit ZipInfo has a fixed date, so equal sessions are equal files.
        archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(about, allow_nan=False))
        archive.writestr(zipfile.ZipInfo(_TOKENS), tokens)
        archive.writestr(zipfile.ZipInfo(_KV), session.kv)
        for key, picture in session.pictures.items():
            archive.writestr(zipfile.ZipInfo(_PICTURES + key), picture)


def read_session(
    path: str | Path, kind: str | None = None, *, state: bool = True, in_progress: bool = True
) -> Session:
    """Read a session file, with the answer in progress that was recorded since the last save.

    Args:
        path: the session file.
        kind: the expected kind of session; None for any.
        state: whether to read the state of the cache, which is most of the file.
        in_progress: whether to include an answer in progress.

    Raises:
        SessionError: the file does not exist, is not a session file, is damaged, or of another kind
            or format.
    """
    with damage_found(path), Path(path).open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise _no_session(path)
        with zipfile.ZipFile(file) as archive:
            found, header, sums = _read_about(path, archive)
            if kind not in (None, found):
                raise SessionError(
                    f"{path} holds a {found}, not a {kind}: open it with the command that made it"
                )
            tokens, kv = _member(archive, _TOKENS), _member(archive, _KV) if state else b""
            named = [name for name in archive.namelist() if state and name.startswith(_PICTURES)]
            pictures = {name.removeprefix(_PICTURES): _member(archive, name) for name in named}
        if sums[_TOKENS] != zlib.crc32(tokens):
            raise ValueError("its header and its tokens belong to different sessions")
        if sums[_KV] != zlib.crc32(kv):
            kv = b""  # the state of another text: the text is read again
        text = np.frombuffer(tokens, _TOKEN).tolist()
        if in_progress:
            record = read_record(path)
            header, text = with_unfinished(record, header, text)
            pictures |= pictures_in(record)
        return Session(found, header, text, kv, pictures)


def read_picture(path: str | Path, key: str) -> bytes | None:
    """Read the file of a picture in a session by its hash; None for an unknown hash.

    Raises:
        SessionError: as in `read_session`.
    """
    with damage_found(path), zipfile.ZipFile(path) as archive:
        name = _PICTURES + key
        if name in archive.namelist():
            return _member(archive, name)
        return pictures_in(read_record(path)).get(key)


@contextlib.contextmanager
def damage_found(path: str | Path) -> Iterator[None]:
    """Turn any error while a session is read into a SessionError."""
    try:
        yield
    except SessionError:
        raise
    except FileNotFoundError as error:
        raise SessionError(f"there is no session file {path}: check the name") from error
    except Exception as error:  # zipfile, json and numpy raise many kinds
        if isinstance(error, OSError) and error.strerror:
            raise SessionError(f"cannot read the session {path}: {error.strerror}") from error
        why = " ".join(str(error).split()) or type(error).__name__
        raise SessionError(
            f"the session file {path} is damaged ({why}): use another copy of it, or start a new "
            "session"
        ) from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the content of a member, after a check of its size: damaged sizes may be huge."""
    info = archive.getinfo(name)
    assert archive.fp is not None
    size = archive.fp.seek(0, os.SEEK_END)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
        raise ValueError(f"{name} is not stored in {info.file_size} bytes")
    return archive.read(info)


def _read_about(
    path: str | Path, archive: zipfile.ZipFile
) -> tuple[str, dict[str, Any], dict[str, int]]:
    """Return kind, header and checksums of a file."""

    def reject(constant: str) -> None:  # NaN and infinities, which Python would accept
        raise ValueError(f"{constant} is not a number")

    about = json.loads(_member(archive, _HEADER), parse_constant=reject)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise _no_session(path)
    version, header, sums = about.get("version"), about.get("header"), about.get(_SUMS)
    if type(version) is not int:
        raise ValueError(f"its format version is {in_one_line(ascii(version))}")
    if version != FORMAT_VERSION:
        raise SessionError(
            f"{path} has format version {version}, and this pyh2o reads {FORMAT_VERSION}: use the "
            "pyh2o that wrote it"
        )
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    if not isinstance(sums, dict) or sums.keys() != {_TOKENS, _KV}:
        raise ValueError("it has no checksums")
    return in_one_line(str(about.get("kind"))), header, sums


def _no_session(path: str | Path) -> SessionError:
    return SessionError(f"{path} is not a session file of pyh2o: check the name")
