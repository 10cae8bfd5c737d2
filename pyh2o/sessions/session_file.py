"""Session files: all that a text needs to go on in another process, in one file.

A file is a ZIP archive of three stored members:

* `header.json`: format, version and kind, the model's identity, the settings, and what the kind of
  session has to remember;
* `tokens.npy`: the tokens of the text, int32 [n_tokens];
* `kv.bin`: what the KV cache holds, as `Llama.kv_state` returns it.

The archive keeps a CRC-32 of each member, so damage is noticed; the header has those of the other
two, so that parts of different sessions are not taken for one. A new file is written beside the old
one and takes its place when it is complete: a crash or a full disk leaves the old one whole.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import SessionError
from ..system.files import replacement
from .records import in_one_line

FORMAT = "pyh2o session"
FORMAT_VERSION = 1

# How the name of a file begins until it is complete.
TEMPORARY = ".pyh2o-session-"

_HEADER, _TOKENS, _KV = "header.json", "tokens.npy", "kv.bin"
# Check sums of the other members, beside the header; the first files do not have them.
_SUMS = "crc32"
# What np.save writes before the numbers: version 1.0, the length of the text, and the text.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"\{'descr': '<i4', 'fortran_order': False, 'shape': \((\d{1,10}),\), \} *\n",
    re.DOTALL,
)

# What comes before the numbers of a text that has fewer than a million million tokens.
_NPY_HEADER_BYTES = 128

# All that a damaged or foreign archive makes zipfile, json and numpy raise.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class Session:
    """What a session file holds.

    Attributes:
        kind: what the session is of: "conversation" or "story".
        header: the fields of a record, fit for JSON: `model` and `settings` are those of
            `model_identity` and `settings_identity`, the rest is the kind's own.
        tokens: of the text; [n_tokens].
        kv: what the KV cache holds.
        path: the file that it was read from.
    """

    kind: str
    header: dict[str, Any]
    tokens: list[int]
    kv: bytes
    path: Path | None = field(default=None, compare=False)


# -------------------------------------------------------------------------------------------------
# Writing
# -------------------------------------------------------------------------------------------------


def write_session(path: str | Path, session: Session) -> None:
    """Write a session file, or leave an old one of that name as it is.

    An existing file keeps its permissions; of a link the target is replaced.

    Raises:
        SessionError: it cannot be written; the message says why.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = _mode(path, target)
        with replacement(target, prefix=TEMPORARY, mode=mode) as file:
            _write_archive(file, session)
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
    tokens = io.BytesIO()
    np.save(tokens, np.asarray(session.tokens, dtype="<i4"), allow_pickle=False)
    about = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "kind": session.kind,
        "header": session.header,
        _SUMS: {_TOKENS: zlib.crc32(tokens.getbuffer()), _KV: zlib.crc32(session.kv)},
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        # A ZipInfo of its own has no date: equal sessions are equal files.
        archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(about, allow_nan=False))
        archive.writestr(zipfile.ZipInfo(_TOKENS), tokens.getbuffer())
        archive.writestr(zipfile.ZipInfo(_KV), session.kv)


# -------------------------------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------------------------------


def read_session(path: str | Path, kind: str) -> Session:
    """Read a session file.

    Args:
        path: the file.
        kind: the kind of session it has to be.

    Raises:
        SessionError: there is no such file, it is no session file, it is damaged, of another kind,
            or of a newer format.
    """
    path = Path(path)
    with _opened(path) as file:
        return _read_archive(path, file, kind)


def read_header(path: str | Path, kind: str) -> dict[str, Any]:
    """Read the header of a session file alone, which is quick however large the file is.

    Raises:
        SessionError: as for `read_session`, but for damage elsewhere in the file.
    """
    path = Path(path)
    with _opened(path) as file, zipfile.ZipFile(file) as archive:
        return _read_header(path, _json(_member(archive, _HEADER)), kind)


@dataclass(frozen=True)
class Overview:
    """What a session file says without its large parts.

    Attributes:
        kind, header: as in `Session`.
        n_tokens: of the text.
    """

    kind: str
    header: dict[str, Any]
    n_tokens: int


def read_overview(path: str | Path) -> Overview:
    """Read what a session file of any kind says of itself, which is quick.

    Raises:
        SessionError: as for `read_header`.
    """
    path = Path(path)
    with _opened(path) as file, zipfile.ZipFile(file) as archive:
        about = _json(_member(archive, _HEADER))
        kind = about.get("kind") if isinstance(about, dict) else None
        header = _read_header(path, about, str(kind))
        n_bytes = archive.getinfo(_TOKENS).file_size - _NPY_HEADER_BYTES
    return Overview(str(kind), header, max(0, n_bytes // 4))


def read_tokens(path: str | Path) -> list[int]:
    """The tokens of the text in a session file of any kind.

    Raises:
        SessionError: as for `read_session`.
    """
    with _opened(Path(path)) as file, zipfile.ZipFile(file) as archive:
        return _read_tokens(_member(archive, _TOKENS))


def is_of_kind(path: str | Path, kind: str) -> bool:
    """Whether a session file can be read, and is of this kind."""
    try:
        return read_overview(path).kind == kind
    except SessionError:
        return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A session file to read; whatever goes wrong becomes a SessionError."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise SessionError(f"{path} is not a session file of pyh2o: check the name")
            yield file
    except SessionError:
        raise
    except FileNotFoundError as error:
        raise SessionError(f"there is no session file {path}: check the name") from error
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.strerror:
            raise SessionError(f"cannot read the session {path}: {error.strerror}") from error
        raise SessionError(
            f"the session file {path} is damaged ({_one_line(error)}): use another copy of it, or "
            "start a new session"
        ) from error


def _read_archive(path: Path, file: IO[bytes], kind: str) -> Session:
    with zipfile.ZipFile(file) as archive:
        about = _json(_member(archive, _HEADER))
        header = _read_header(path, about, kind)
        tokens = _read_tokens(_member(archive, _TOKENS))
        kv = _member(archive, _KV)
        sums = about.get(_SUMS, {})
        if not _has_sum(archive, _TOKENS, sums):
            raise ValueError("its header and its tokens are not of one session")
        if not _has_sum(archive, _KV, sums):
            kv = b""  # a state that fits no text: that is read again
    return Session(kind=kind, header=header, tokens=tokens, kv=kv, path=path)


def _read_tokens(data: bytes) -> list[int]:
    """The tokens in a .npy file; NumPy would evaluate the text of its header as Python."""
    found = _NPY.match(data)
    if found is None:
        raise ValueError("its tokens are no array of int32")
    tokens: list[int] = np.frombuffer(data, dtype="<i4", offset=found.end()).tolist()
    if len(found[0]) != 10 + int.from_bytes(found[1], "little") or len(tokens) != int(found[2]):
        raise ValueError(f"it has {len(tokens)} tokens where it should have {int(found[2])}")
    return tokens


def _json(data: bytes) -> Any:
    """JSON without NaN and infinities, which Python would take for numbers."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    return json.loads(data, parse_constant=refuse)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The content of a member, after a look at its size: damaged sizes may be huge."""
    info = archive.getinfo(name)
    assert archive.fp is not None
    size = archive.fp.seek(0, os.SEEK_END)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > size:
        raise ValueError(f"{name} is not stored in {info.file_size} bytes")
    return archive.read(info)


def _has_sum(archive: zipfile.ZipFile, name: str, sums: Any) -> bool:
    """Whether the header was written with this member; zipfile has compared what it read."""
    found = archive.getinfo(name).CRC
    return isinstance(sums, dict) and bool(sums.get(name, found) == found)


def _read_header(path: Path, about: Any, kind: str) -> dict[str, Any]:
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise SessionError(f"{path} is not a session file of pyh2o: check the name")
    version = about.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"its format version is {version!r}")
    if version > FORMAT_VERSION:
        raise SessionError(
            f"{path} has format version {version}, and this pyh2o reads up to {FORMAT_VERSION}: "
            "update pyh2o"
        )
    if about.get("kind") != kind:
        raise SessionError(
            f"{path} holds a {in_one_line(str(about.get('kind')))}, not a {kind}: open it with the "
            "command that made it"
        )
    header = about.get("header")
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    return header


@contextlib.contextmanager
def damage_found(what: str | Path = "the file") -> Iterator[None]:
    """Whatever makes no sense in a session becomes a SessionError."""
    try:
        yield
    except SessionError:
        raise
    except _DAMAGE as error:
        raise SessionError(
            f"the session file is damaged ({_one_line(error)}): use another copy of {what}"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
