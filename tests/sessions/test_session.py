"""Session files: whole or refused, and never half written."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import stat
import zipfile
from collections.abc import Callable
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
    check_same,
    model_identity,
    read_header,
    read_session,
    settings_identity,
    write_session,
)
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

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


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path, session: Session) -> None:
    (tmp_path / "other").touch()
    write_session(tmp_path / "chat", session)
    assert (tmp_path / "chat").stat().st_mode == (tmp_path / "other").stat().st_mode


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
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SessionError, match="File too large"):
            write_session(path, replace(session, kv=bytes(1_000_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
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


def test_a_flipped_bit_is_noticed(path: Path, session: Session, rng: np.random.Generator) -> None:
    data = path.read_bytes()
    refused = 0
    for bit in rng.integers(0, 8 * len(data), 800):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        refused += refused_or_the_same(path, bytes(flipped), session)
    # dates and such in the archive's own tables do not matter
    assert refused > 700


def test_a_flipped_bit_anywhere_in_the_tables_is_noticed(path: Path, session: Session) -> None:
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        tables = archive.start_dir
    assert len(data) - tables > 150
    for bit in range(8 * tables, 8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        refused_or_the_same(path, bytes(flipped), session)


def test_the_header_can_be_read_alone(path: Path, session: Session) -> None:
    data = bytearray(path.read_bytes())
    # what is damaged elsewhere is not looked at
    data[data.index(session.kv)] ^= 1
    path.write_bytes(data)
    assert read_header(path, "conversation") == HEADER
    with pytest.raises(SessionError, match="damaged"):
        reread(path)
    data[data.index(b'"turns"')] ^= 1
    path.write_bytes(data)
    for kind, file, message in [
        ("conversation", path, "damaged"),
        ("conversation", path.with_name("none"), "there is no session file"),
    ]:
        with pytest.raises(SessionError, match=message) as error:
            read_header(file, kind)
        one_line(error)


def test_a_truncated_file_is_refused(
    path: Path, session: Session, rng: np.random.Generator
) -> None:
    data = path.read_bytes()
    for size in [0, 1, 3, 4, len(data) - 1, *rng.integers(0, len(data), 200)]:
        assert refused_or_the_same(path, data[:size], session)


def test_random_damage_is_noticed(path: Path, session: Session, rng: np.random.Generator) -> None:
    data = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(data)
        start = rng.integers(0, len(data))
        damaged[start : start + 64] = rng.bytes(len(damaged[start : start + 64]))
        refused_or_the_same(path, bytes(damaged), session)


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
    with zipfile.ZipFile(path) as archive:
        old = {name: archive.read(name) for name in archive.namelist()}
    new = {"header.json": "header", "tokens.npy": "tokens", "kv.bin": "kv"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in old.items():
            content = members.get(new[name], data)
            if content is not None:
                archive.writestr(name, content)


def test_a_newer_format_is_refused(path: Path) -> None:
    about = {"format": "pyh2o session", "version": FORMAT_VERSION + 1, "kind": "conversation"}
    rewrite(path, header=json.dumps(about).encode())
    with pytest.raises(SessionError, match="update pyh2o") as error:
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


def saved(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


class Alarm:
    """Its unpickling would be noticed."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, ("unpickled",))


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        b"",
        b"\x93NUMPY",
        saved(np.zeros((2, 2), dtype=np.int32)),
        saved(np.zeros(2, dtype=np.int64)),
        saved(np.zeros(2, dtype=np.float32)),
        saved(np.array([Alarm()], dtype=object), allow_pickle=True),
        saved(np.zeros(2, dtype=np.int32)).replace(b"(2,)", b"(2000000000000000,)"),
    ],
)
def test_tokens_that_are_none_are_refused(
    path: Path, tokens: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    rewrite(path, tokens=tokens)
    with pytest.raises(SessionError, match="damaged") as error:
        reread(path)
    one_line(error)
    assert not (path.parent / "unpickled").exists()


def test_a_compressed_member_is_refused(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        old = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in old.items():
            archive.writestr(name, bytes(10_000_000) if name == "kv.bin" else data)
    with pytest.raises(SessionError, match="damaged"):
        reread(path)


# -------------------------------------------------------------------------------------------------
# The model and the settings
# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=1)


def session_of(llm: Any) -> Session:
    header = {"model": model_identity(llm), "settings": settings_identity(llm)}
    return Session(kind="story", header=header, tokens=[1, 2, 3], kv=b"")


def after_json(session: Session) -> Session:
    return replace(session, header=json.loads(json.dumps(session.header)))


def test_the_same_model_and_settings_fit(model: Path, tmp_path: Path) -> None:
    settings = {"n_ctx": 100, "rope_freq_scale": 0.3, "yarn_attn_factor": 0.7}
    made = after_json(session_of(tiny_llama(model, **settings)))
    check_same(made, tiny_llama(model, **settings))
    # the name does not matter, nor do batches
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    check_same(made, tiny_llama(copy, n_batch=32, **settings))


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"n_ctx": 200}, "made with --ctx 100, and the model is loaded with --ctx 200"),
        ({"n_ctx": 100, "hh": 20}, "made with --hh 10, and the model is loaded with --hh 20"),
        ({"n_ctx": 100, "recent": 9}, "--recent 10, and the model is loaded with --recent 9"),
        ({"n_ctx": 100, "pinned": 1}, "--pinned 0"),
        ({"n_ctx": 100, "slack": 5}, "--slack 5"),
        ({"n_ctx": 100, "policy": "tova"}, "made with --policy h2o, .* with --policy tova"),
        ({"n_ctx": 100, "positions": "dense"}, "made with --positions original"),
        ({"n_ctx": 100, "evict": False}, "made with eviction, .* loaded with --no-evict"),
        ({"n_ctx": 100, "type_k": 8, "type_v": 8}, "--kv-type f16, .* --kv-type q8_0"),
        ({"n_ctx": 100, "flash_attn": False}, "flash_attn"),
        ({"n_ctx": 100, "rope_freq_base": 5000.0}, "rope_freq_base"),
        ({"n_ctx": 100, "last_n_tokens_size": 8}, "last_n_tokens_size"),
    ],
)
def test_other_settings_are_refused(model: Path, mine: dict[str, Any], message: str) -> None:
    made = after_json(session_of(tiny_llama(model, n_ctx=100)))
    with pytest.raises(SessionError, match=message) as error:
        check_same(made, tiny_llama(model, **mine))
    assert "start a new session" in one_line(error)


def test_another_model_of_the_same_name_is_refused(model: Path, tmp_path: Path) -> None:
    made = session_of(tiny_llama(model, n_ctx=100))
    other = write_tiny_gguf(tmp_path / "tiny.gguf", seed=2)
    with pytest.raises(SessionError, match=r"made with the model tiny\.gguf") as error:
        check_same(made, tiny_llama(other, n_ctx=100))
    one_line(error)


def test_a_model_that_differs_only_in_its_size_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MODEL_HEADER_BYTES", 1000)
    made = session_of(tiny_llama(model, n_ctx=100))
    other = tmp_path / "longer.gguf"
    other.write_bytes(model.read_bytes() + b"more")
    with pytest.raises(SessionError, match="made with the model"):
        check_same(made, tiny_llama(other, n_ctx=100))


def test_a_model_file_that_is_gone_is_named(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "gone.gguf"
    copy.write_bytes(model.read_bytes())
    llm = tiny_llama(copy)
    copy.unlink()
    with pytest.raises(SessionError, match=r"gone\.gguf"):
        model_identity(llm)


@pytest.mark.parametrize(
    "changes",
    [
        {"header": {}},
        {"header": {"model": 1, "settings": {}}},
        {"header": {"model": {}, "settings": None}},
        {"header": {"model": {}, "settings": {}}},
        {"tokens": [-1]},
        {"tokens": [384]},
    ],
)
def test_a_session_that_makes_no_sense_is_refused(model: Path, changes: dict[str, Any]) -> None:
    llm = tiny_llama(model, n_ctx=100)
    with pytest.raises(SessionError) as error:
        check_same(replace(session_of(llm), **changes), llm)
    one_line(error)
    without_a_setting = session_of(llm)
    del without_a_setting.header["settings"]["positions"]
    with pytest.raises(SessionError, match="--positions unknown"):
        check_same(without_a_setting, llm)
