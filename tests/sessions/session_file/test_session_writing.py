"""Writing a session file: whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from full_disk import full_disk
from pyh2o.errors import SessionError
from pyh2o.sessions import session_file as session_module
from pyh2o.sessions.session_file import FORMAT_VERSION, Session, read_session, write_session
from session_files import names, one_line, reread


def test_what_was_written_is_read(path: Path, session: Session) -> None:
    assert reread(path) == session
    assert names(path.parent) == [path.name]


def test_an_empty_text_can_be_kept(tmp_path: Path) -> None:
    empty = Session(kind="story", header={}, tokens=[], kv=b"")
    write_session(tmp_path / "empty", empty)
    assert read_session(tmp_path / "empty", "story") == empty


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


def fail_in_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(session_module.os, "replace", full)


def fail_in_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(session_module.os, "fsync", full)


def fail_in_the_last_member(monkeypatch: pytest.MonkeyPatch) -> None:
    writestr = zipfile.ZipFile.writestr

    def full(archive: zipfile.ZipFile, info: zipfile.ZipInfo, data: bytes) -> None:
        if info.filename == "kv.bin":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        writestr(archive, info, data)

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)


@pytest.mark.parametrize("fail", [fail_in_replace, fail_in_fsync, fail_in_the_last_member])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_full_disk_leaves_the_old_file_whole(
    path: Path,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[pytest.MonkeyPatch], None],
    is_new: bool,
) -> None:
    before = path.read_bytes()
    target = path.with_name("new") if is_new else path
    fail(monkeypatch)
    with pytest.raises(SessionError, match="No space left on device") as error:
        write_session(target, replace(session, kv=b"new"))
    assert str(target) in one_line(error)
    assert path.read_bytes() == before
    assert names(path.parent) == [path.name]


def test_a_file_that_may_not_grow_leaves_the_old_file_whole(path: Path, session: Session) -> None:
    before = path.read_bytes()
    with full_disk(100_000), pytest.raises(SessionError, match="File too large"):
        write_session(path, replace(session, kv=bytes(1_000_000)))
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
