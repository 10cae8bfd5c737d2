"""Session files: all that a text needs to go on in another process, in one file.

A file is a ZIP archive of stored members:

* `header.json`: format, version and kind, the model's identity, the settings, what the kind of
  session has to remember, and the CRC-32 of the other two members;
* `tokens.bin`: the tokens of the text, little-endian int32 [n_tokens];
* `kv.bin`: what the KV cache holds, as `Llama.kv_state` returns it.

Behind them come the files of pictures in the text, each under its hash.

The archive keeps a CRC-32 of each member, so damage is noticed; those in the header tell parts of
different sessions apart. A new file is written beside the old one and takes its place when it is
complete: a crash or a full disk leaves the old one whole.
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
from .unfinished import path_beside, pictures_in, read_note, with_unfinished

FORMAT = "pyh2o session"
FORMAT_VERSION = 1

# How the name of a file begins until it is complete.
TEMPORARY = ".pyh2o-session-"

_HEADER, _TOKENS, _KV, _PICTURES = "header.json", "tokens.bin", "kv.bin", "pictures/"
_SUMS = "crc32"
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True)
class Session:
    """What a session file holds.

    Attributes:
        kind: what the session is of: "conversation" or "story".
        header: the fields of a record, fit for JSON: `model` and `settings` are those of
            `model_identity` and `settings_identity`, the rest is the kind's own.
        tokens: of the text; [n_tokens].
        kv: what the KV cache holds; nothing where it was not read.
        pictures: files of those in the text, by their hashes; none where the state was not read.
    """

    kind: str
    header: dict[str, Any]
    tokens: list[int]
    kv: bytes | mmap
    pictures: Mapping[str, bytes] = field(default_factory=dict)


def write_session(path: str | Path, session: Session) -> None:
    """Write a session file, or leave an old one of that name as it is.

    An existing file keeps its permissions; of a link the target is replaced.

    Raises:
        SessionError: it cannot be written; the message says why.
    """
    try:
        target = Path(os.path.realpath(path))
        with replacement(target, prefix=TEMPORARY, mode=_mode(path, target)) as file:
            _write_archive(file, session)
        path_beside(path).unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise SessionError(
            f"cannot save the session to {path}: {reason}; a file that was there is unchanged"
        ) from error


def _mode(path: str | Path, target: Path) -> int:
    """Permissions of the file that is there; a new one is its owner's alone."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return 0o600
    if not stat.S_ISREG(mode):
        raise SessionError(
            f"cannot save the session to {path}: it is not a file; give another name"
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
        # A ZipInfo of its own has no date: equal sessions are equal files.
        archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(about, allow_nan=False))
        archive.writestr(zipfile.ZipInfo(_TOKENS), tokens)
        archive.writestr(zipfile.ZipInfo(_KV), session.kv)
        for key, picture in session.pictures.items():
            archive.writestr(zipfile.ZipInfo(_PICTURES + key), picture)


def read_session(
    path: str | Path, kind: str | None = None, *, state: bool = True, noted: bool = True
) -> Session:
    """Read a session file, with the answer that was cut off since it was written, if there is one.

    Args:
        path: the file.
        kind: the kind of session it has to be; None for any.
        state: whether to read what the cache held, too, which is most of the file.
        noted: False leaves an answer out that was cut off, or is in the making.

    Raises:
        SessionError: there is no such file, it is no session file, it is damaged, of another kind,
            or of another format.
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
            raise ValueError("its header and its tokens are not of one session")
        if sums[_KV] != zlib.crc32(kv):
            kv = b""  # a state that fits no text: that is read again
        text = np.frombuffer(tokens, _TOKEN).tolist()
        if noted:
            made = read_note(path)
            header, text = with_unfinished(made, header, text)
            pictures |= pictures_in(made)
        return Session(found, header, text, kv, pictures)


def read_picture(path: str | Path, key: str) -> bytes | None:
    """Read the file of a picture in a session by its hash; None if it has no such picture.

    Raises:
        SessionError: as for `read_session`.
    """
    with damage_found(path), zipfile.ZipFile(path) as archive:
        name = _PICTURES + key
        if name in archive.namelist():
            return _member(archive, name)
        return pictures_in(read_note(path)).get(key)


@contextlib.contextmanager
def damage_found(path: str | Path) -> Iterator[None]:
    """Whatever makes no sense in a session, or cannot be read, becomes a SessionError."""
    try:
        yield
    except SessionError:
        raise
    except FileNotFoundError as error:
        raise SessionError(f"there is no session file {path}: check the name") from error
    except Exception as error:  # zipfile, json and numpy raise whatever comes to them
        if isinstance(error, OSError) and error.strerror:
            raise SessionError(f"cannot read the session {path}: {error.strerror}") from error
        why = " ".join(str(error).split()) or type(error).__name__
        raise SessionError(
            f"the session file {path} is damaged ({why}): use another copy of it, or start a new "
            "session"
        ) from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The content of a member, after a look at its size: damaged sizes may be huge."""
    info = archive.getinfo(name)
    assert archive.fp is not None
    size = archive.fp.seek(0, os.SEEK_END)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
        raise ValueError(f"{name} is not stored in {info.file_size} bytes")
    return archive.read(info)


def _read_about(
    path: str | Path, archive: zipfile.ZipFile
) -> tuple[str, dict[str, Any], dict[str, int]]:
    """Kind, header and check sums of a file in the one format that there is."""

    def refuse(constant: str) -> None:  # NaN and infinities, which Python would take for numbers
        raise ValueError(f"{constant} is no number")

    about = json.loads(_member(archive, _HEADER), parse_constant=refuse)
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
        raise ValueError("it has no check sums")
    return in_one_line(str(about.get("kind"))), header, sums


def _no_session(path: str | Path) -> SessionError:
    return SessionError(f"{path} is not a session file of pyh2o: check the name")
