"""Session files: all that a text needs to go on in another process, in one file.

A file is a ZIP archive of three stored members:

* `header.json`: format, version and kind, the model's identity, the settings, and what the kind of
  session has to remember;
* `tokens.npy`: the tokens of the text, int32 [n_tokens];
* `kv.bin`: what the KV cache holds, as `Llama.kv_state` returns it.

The archive keeps a CRC-32 of each member, so damage is noticed. A new file is written beside the
old one and takes its place when it is complete: a crash or a full disk leaves the old one whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
import struct
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np

from ..cache.settings import EvictionSettings, saved_names
from ..errors import SessionError
from ..llama import KV_TYPES, Llama
from ..system.files import replacement
from .records import Count, Range, Scalar, in_one_line, record_of, value_of

FORMAT = "pyh2o session"
FORMAT_VERSION = 1

# The header of a GGUF file, its vocabulary and the shapes of all tensors, is shorter than this in
# today's models; a hash of it tells models apart without reading gigabytes.
MODEL_HEADER_BYTES = 16 * 2**20

# How the name of a file begins until it is complete.
TEMPORARY = ".pyh2o-session-"

_HEADER, _TOKENS, _KV = "header.json", "tokens.npy", "kv.bin"
# What np.save writes before the numbers: version 1.0, the length of the text, and the text.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"\{'descr': '<i4', 'fortran_order': False, 'shape': \((\d{1,10}),\), \} *\n",
    re.DOTALL,
)

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

_identities: weakref.WeakKeyDictionary[Llama, ModelIdentity] = weakref.WeakKeyDictionary()


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
        mode = _mode_to_keep(path, target)
        with replacement(target, prefix=TEMPORARY, mode=mode) as file:
            _write_archive(file, session)
    except OSError as error:
        reason = error.strerror or error
        raise SessionError(
            f"cannot save the session to {path}: {reason}; a file that was there is unchanged"
        ) from error


def _mode_to_keep(path: str | Path, target: Path) -> int | None:
    """Permissions of the file that is there, or None."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise SessionError(
            f"cannot save the session to {path}: it is not a file; give another name"
        )
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is write-protected")
    return stat.S_IMODE(mode)


def _write_archive(file: IO[bytes], session: Session) -> None:
    about = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "kind": session.kind,
        "header": session.header,
    }
    tokens = io.BytesIO()
    np.save(tokens, np.asarray(session.tokens, dtype="<i4"), allow_pickle=False)
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
        header = _read_header(path, _json(_member(archive, _HEADER)), kind)
        tokens = _read_tokens(_member(archive, _TOKENS))
        kv = _member(archive, _KV)
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# -------------------------------------------------------------------------------------------------
# The model and the settings
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelIdentity:
    """What tells a model from others.

    Attributes:
        file: name of the file.
        bytes: its size.
        sha256: hash of its header, in hexadecimal digits.
        path: where to look for it first; the same model elsewhere is as good.
    """

    file: str
    bytes: Annotated[int, Range(0, 2**63 - 1)]
    sha256: str
    path: str = ""


# The settings of a cache by their names, which differ between versions (see `settings_identity`).
Settings = dict[str, Scalar | dict[str, Scalar]]
_SETTING_TYPES: dict[str, Any] = {
    "evict": bool,
    **dict.fromkeys(("ctx", "heavy", "recent", "pinned", "slack", "n_pos", "recall"), Count),
    **dict.fromkeys(("policy", "positions", "recall_type", "type_k", "type_v"), str),
}


def check_settings(settings: Settings) -> None:
    """Refuse settings that the command line could not read.

    Raises:
        ValueError: one is something else than it should be.
    """
    for name, kind in _SETTING_TYPES.items():
        if name in settings:
            value_of(kind, settings[name], name)


def model_identity(llm: Llama) -> ModelIdentity:
    """What tells the model of `llm` from others.

    Raises:
        SessionError: the model file is gone.
    """
    identity = _identities.get(llm)
    if identity is None:
        path = str(Path(llm.model_path).absolute())
        identity = _identities[llm] = ModelIdentity(**file_identity(llm.model_path), path=path)
    return identity


def settings_identity(llm: Llama) -> dict[str, Any]:
    """The settings that a state of the cache depends on, and how the text goes on after it.

    Threads, batch sizes and devices may differ: they change the rounding of a result, no more.
    """
    params = llm.context_params
    lora = (
        None if llm.lora_path is None else file_identity(llm.lora_path) | {"scale": llm.lora_scale}
    )
    return {
        "evict": llm.evicting,
        "ctx": llm.n_ctx(),
        **({} if llm.budget is None else llm.budget.saved()),
        "type_k": _type_name(params.type_k),
        "type_v": _type_name(params.type_v),
        "flash_attn": int(params.flash_attn_type),
        **{name: getattr(params, name) for name in _ROPE},
        "lora": lora,
        "kv_overrides": llm.kv_overrides,
        "last_n_tokens_size": llm.last_n_tokens_size,
    }


_OPTIONS = {
    "ctx": "--ctx",
    **{saved: f"--{name.replace('_', '-')}" for name, saved in saved_names().items()},
    "type_k": "--kv-type",
    "type_v": "--kv-type",
}
# Settings that the first version did not have, with the values that are no change.
_LATER = {name: getattr(EvictionSettings(), name) for name in ("recall", "recall_type")}
_ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


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


def check_same(session: Session, llm: Llama) -> None:
    """Refuse a session that was made with another model or other settings.

    Raises:
        SessionError: naming the first thing that differs.
    """
    with damage_found():
        model = record_of(ModelIdentity, session.header.get("model"), "model")
        settings = value_of(Settings, session.header.get("settings"), "settings")
        check_settings(settings)
    mine = model_identity(llm)
    if (model.sha256, model.bytes) != (mine.sha256, mine.bytes):
        raise SessionError(
            f"this session was made with the model {in_one_line(model.file)}, which is another "
            f"than {mine.file}: give that one (--model), or start a new session"
        )
    _check_same_settings(settings, settings_identity(llm))
    if any(not 0 <= token < llm.n_vocab() for token in session.tokens):
        raise SessionError(
            "the session file is damaged (it has tokens the model does not know): use another copy "
            "of it"
        )


def _check_same_settings(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    # An older version did not know them, and did what their defaults say.
    theirs = {**{name: _LATER[name] for name in _LATER.keys() & mine.keys()}, **theirs}
    for name in {**mine, **theirs}:
        if name not in mine or name not in theirs or theirs[name] != mine[name]:
            raise SessionError(
                f"this session was made with {_shown(name, theirs)}, and the model is loaded with "
                f"{_shown(name, mine)}: give the same settings, or start a new session"
            )


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    """A setting as the user gives it."""
    if name == "evict":
        return "eviction" if settings.get(name) else "--no-evict"
    value = settings.get(name, "unknown")
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{_OPTIONS.get(name) or in_one_line(name)} {in_one_line(text)}"


def file_identity(path: str) -> dict[str, Any]:
    """What tells a model file from others, without loading it: its name, size and header's hash.

    Raises:
        SessionError: the file is gone.
    """
    try:
        with Path(path).open("rb") as file:
            header = file.read(MODEL_HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise SessionError(
            f"cannot tell which model {path} is: {error.strerror}; put the file back"
        ) from error
    return {"file": Path(path).name, "bytes": size, "sha256": hashlib.sha256(header).hexdigest()}


def _type_name(number: int) -> str:
    names = {number: name for name, number in KV_TYPES.items()}
    return names.get(number, str(number))
