"""Reading a session file: what is damaged or no session is refused."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o.errors import SessionError
from pyh2o.sessions.session_file import (
    FORMAT_VERSION,
    Session,
    read_overview,
    read_session,
    write_session,
)
from rewritten_sessions import HEADER as HEADER_JSON
from rewritten_sessions import KV, TOKENS, members_of, session_of, with_sums
from session_files import HEADER, one_line, reread


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
    assert read_overview(path, "conversation").header == HEADER
    with pytest.raises(SessionError, match="damaged"):
        reread(path)
    data[data.index(b'"turns"')] ^= 1
    path.write_bytes(data)
    for kind, file, message in [
        ("conversation", path, "damaged"),
        ("conversation", path.with_name("none"), "there is no session file"),
    ]:
        with pytest.raises(SessionError, match=message) as error:
            read_overview(file, kind)
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
