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
from rewritten_sessions import KV, TOKENS, members_of, session_of, with_sums

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


def test_equal_sessions_are_equal_files(path: Path, session: Session) -> None:
    write_session(path.with_name("again"), session)
    assert path.with_name("again").read_bytes() == path.read_bytes()


def test_it_is_an_archive_that_other_tools_can_open(path: Path, session: Session) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        about = json.loads(archive.read("header.json"))
        assert archive.read("kv.bin") == session.kv
    assert about["version"] == FORMAT_VERSION
    assert about["kind"] == "conversation"


def test_a_new_file_is_its_owners_alone(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_old_file_keeps_its_permissions(path: Path, session: Session) -> None:
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


def test_a_long_name_is_no_problem(tmp_path: Path, session: Session) -> None:
    path = tmp_path / ("n" * 255)
    write_session(path, session)
    assert reread(path) == session


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


def test_ctrl_c_leaves_the_old_file_whole(
    path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def interrupted(_handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session_module.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_session(path, replace(session, kv=b"new"))
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
        with pytest.raises(SessionError, match="it is not a file"):
            write_session(target, session)
    with pytest.raises(SessionError, match="No such file or directory"):
        write_session(tmp_path / "nowhere" / "chat", session)
    assert names(tmp_path) == []
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


# -------------------------------------------------------------------------------------------------
# Reading
# -------------------------------------------------------------------------------------------------


def refused_or_the_same(path: Path, data: bytes, session: Session) -> bool:
    """Whether damaged data is refused; if not, it has to be the same session."""
    path.write_bytes(data)
    try:
        found = reread(path)
    except SessionError:
        return True
    assert found == session
    return False


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


def test_a_truncated_file_is_refused(
    path: Path, session: Session, rng: np.random.Generator
) -> None:
    data = path.read_bytes()
    for size in [0, 1, 3, 4, len(data) - 1, *rng.integers(0, len(data), 200)]:
        assert refused_or_the_same(path, data[:size], session)


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


def rewrite(path: Path, **members: bytes | None) -> None:
    """Replace members of an archive, with right check sums; None leaves one out."""
    old = members_of(path.read_bytes())
    new = {HEADER_JSON: "header", TOKENS: "tokens", KV: "kv"}
    found = {name: members.get(new[name], data) for name, data in old.items()}
    there = {name: data for name, data in found.items() if data is not None}
    path.write_bytes(session_of(with_sums(there)))


def test_rewritten_with_right_sums_it_is_the_same(path: Path, session: Session) -> None:
    rewrite(path)
    assert reread(path) == session


@pytest.mark.parametrize("sums", [None, {}, {KV: 1}, {TOKENS: 1}, [TOKENS, KV], 5])
def test_a_header_without_check_sums_is_refused(path: Path, sums: Any) -> None:
    members = members_of(path.read_bytes())
    about = json.loads(members[HEADER_JSON]) | {"crc32": sums}
    path.write_bytes(session_of({**members, HEADER_JSON: json.dumps(about).encode()}))
    with pytest.raises(SessionError, match="damaged") as error:
        reread(path)
    one_line(error)


def test_parts_of_two_sessions_are_no_session(
    path: Path, session: Session, rng: np.random.Generator
) -> None:
    """Each is whole, and they would fit: the tokens of a text and the state of another one."""
    other = path.with_name("other")
    tokens, kv = rng.permutation(session.tokens).tolist(), rng.bytes(len(session.kv))
    write_session(other, replace(session, tokens=tokens, kv=kv))
    members, others = members_of(path.read_bytes()), members_of(other.read_bytes())
    path.write_bytes(session_of({**members, TOKENS: others[TOKENS]}))
    with pytest.raises(SessionError, match="not of one session") as error:
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


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"format"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": "pyh2o session"}',
        b'{"format": "pyh2o session", "version": true}',
        b'{"format": "pyh2o session", "version": 0}',
        b'{"format": "pyh2o session", "version": "1"}',
        b'{"format": "pyh2o session", "version": 1}',
        b'{"format": "pyh2o session", "version": 1, "kind": ["conversation"]}',
        b'{"format": "pyh2o session", "version": 1, "kind": "conversation"}',
        b'{"format": "pyh2o session", "version": 1, "kind": "conversation", "header": 5}',
    ],
)
def test_an_edited_header_is_refused(path: Path, header: bytes) -> None:
    rewrite(path, header=header)
    with pytest.raises(SessionError) as error:
        reread(path)
    one_line(error)


@pytest.mark.parametrize("tokens", [None, b"123", b"12345"])
def test_tokens_that_are_none_are_refused(path: Path, tokens: bytes | None) -> None:
    rewrite(path, tokens=tokens)
    with pytest.raises(SessionError, match="damaged") as error:
        reread(path)
    one_line(error)


def test_a_compressed_member_is_refused(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        old = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in old.items():
            archive.writestr(name, bytes(10_000_000) if name == KV else data)
    with pytest.raises(SessionError, match="damaged"):
        reread(path)
