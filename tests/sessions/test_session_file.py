"""A session file: written whole or not at all, and refused if it is damaged or none."""

from __future__ import annotations

import errno
import json
import os
import stat
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o.errors import SessionError
from pyh2o.sessions import session_file as session_module
from pyh2o.sessions.session_file import (
    FORMAT_VERSION,
    Session,
    read_session,
    write_session,
)
from rewritten_sessions import HEADER as HEADER_JSON
from rewritten_sessions import KV, TOKENS, members_of, session_of

HEADER = {
    "model": {"file": "a.gguf"},
    "settings": {"ctx": 100, "rope_freq_scale": 0.1},
    "turns": [{"user": 'say "\ud800 ñ 日本"', "answer": "\n\t"}],
}


@pytest.fixture
def session(rng: np.random.Generator) -> Session:
    return Session(
        kind="conversation",
        header=HEADER,
        tokens=rng.integers(0, 2**31 - 1, 50).tolist(),
        kv=rng.bytes(3000),
    )


@pytest.fixture
def path(tmp_path: Path, session: Session) -> Path:
    path = tmp_path / "chat.session"
    write_session(path, session)
    return path


def reread(path: Path) -> Session:
    return read_session(path, "conversation")


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def one_line(error: pytest.ExceptionInfo[SessionError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# -------------------------------------------------------------------------------------------------
# Writing
# -------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(path: Path, session: Session) -> None:
    assert reread(path) == session
    assert names(path.parent) == [path.name]


def test_a_file_is_its_owners_alone_and_keeps_its_permissions(path: Path, session: Session) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    write_session(path, replace(session, kv=b"new"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert reread(path).kv == b"new"


def test_a_link_stays_a_link(path: Path, session: Session) -> None:
    folder = path.parent / "links"
    folder.mkdir()
    link = folder / "link"
    link.symlink_to(path)
    write_session(link, replace(session, kv=b"new"))
    assert link.is_symlink()
    assert reread(path).kv == b"new"
    assert names(folder) == ["link"]


def full(*_args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", [(os, "replace"), (os, "fsync"), (zipfile.ZipFile, "writestr")])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_full_disk_leaves_the_old_file_whole(
    path: Path,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[Any, str],
    is_new: bool,
) -> None:
    before = path.read_bytes()
    target = path.with_name("new") if is_new else path
    monkeypatch.setattr(*where, full)
    with pytest.raises(SessionError, match="No space left on device") as error:
        write_session(target, replace(session, kv=b"new"))
    assert str(target) in one_line(error)
    assert path.read_bytes() == before
    assert names(path.parent) == [path.name]


def test_a_write_protected_file_is_left_alone(
    path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    # a superuser may write everything
    monkeypatch.setattr(session_module.os, "access", lambda *_: False)
    with pytest.raises(SessionError, match="write-protected"):
        write_session(path, replace(session, kv=b"new"))
    assert path.read_bytes() == before


def test_places_that_are_no_files_are_refused(tmp_path: Path, session: Session) -> None:
    for target in (tmp_path, Path(os.devnull)):
        with pytest.raises(SessionError, match="it is not a regular file"):
            write_session(target, session)
    with pytest.raises(SessionError, match="No such file or directory"):
        write_session(tmp_path / "nowhere" / "chat", session)
    assert names(tmp_path) == []
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


# -------------------------------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------------------------------


def test_the_header_can_be_read_alone(path: Path, session: Session) -> None:
    data = bytearray(path.read_bytes())
    # what is damaged elsewhere is not looked at
    data[data.index(session.kv)] ^= 1
    path.write_bytes(data)
    assert read_session(path, "conversation", state=False).header == HEADER
    with pytest.raises(SessionError, match="damaged"):
        reread(path)
    data[data.index(b'"turns"')] ^= 1
    path.write_bytes(data)
    for kind, file, message in [
        ("conversation", path, "damaged"),
        ("conversation", path.with_name("none"), "there is no session file"),
    ]:
        with pytest.raises(SessionError, match=message) as error:
            read_session(file, kind, state=False)
        one_line(error)


def test_what_is_no_session_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(SessionError, match="there is no session file") as error:
        reread(tmp_path / "missing")
    one_line(error)
    with pytest.raises(SessionError, match="Is a directory"):
        reread(tmp_path)
    for content in (b"", b"GGUF", b"hello" * 100):
        path.write_bytes(content)
        with pytest.raises(SessionError, match="not a session file"):
            reread(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.txt", "hello")
    with pytest.raises(SessionError, match="damaged"):
        reread(path)


def test_another_kind_is_refused(path: Path) -> None:
    with pytest.raises(SessionError, match="holds a conversation, not a story") as error:
        read_session(path, "story")
    one_line(error)


def rewrite(path: Path, header: bytes) -> None:
    """Replace the header of an archive."""
    path.write_bytes(session_of({**members_of(path.read_bytes()), HEADER_JSON: header}))


def test_parts_of_two_sessions_are_no_session(
    path: Path, session: Session, rng: np.random.Generator
) -> None:
    """Each is whole, and they would fit: the tokens of a text and the state of another one."""
    other = path.with_name("other")
    tokens, kv = rng.permutation(session.tokens).tolist(), rng.bytes(len(session.kv))
    write_session(other, replace(session, tokens=tokens, kv=kv))
    members, others = members_of(path.read_bytes()), members_of(other.read_bytes())
    path.write_bytes(session_of({**members, TOKENS: others[TOKENS]}))
    with pytest.raises(SessionError, match="belong to different sessions") as error:
        reread(path)
    one_line(error)
    # the text of one without its state can be read again
    path.write_bytes(session_of({**members, KV: others[KV]}))
    assert reread(path) == replace(session, kv=b"")


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused(path: Path, version: int) -> None:
    about = {"format": "pyh2o session", "version": version, "kind": "conversation"}
    rewrite(path, header=json.dumps(about).encode())
    with pytest.raises(SessionError, match="use the pyh2o that wrote it") as error:
        reread(path)
    one_line(error)
