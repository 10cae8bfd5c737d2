"""An archive file is read back after it is closed, truncated or damaged."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from archive import (
    HEADER,
    LAYERS,
    N_PAGE,
    PAGE_HEADER,
    SMALL,
    Archive,
    ArchiveError,
    Token,
    append,
    assert_file_holds,
    assert_holds,
    opened,
    random_token,
    written,
)
from checksums import checksum
from compiled import pointer


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_whole_pages_are_read_back(rng: np.random.Generator, path: Path, kind: str) -> None:
    archive, tokens = Archive(kind), dict[int, Token]()
    archive.open_file(path)
    steps = (3, N_PAGE - 4, 1, 1, 5 * N_PAGE - 20)
    for n in steps:
        append(archive, tokens, rng, n)
        assert_holds(archive, tokens)
    archive.release()
    assert_holds(archive, tokens)
    assert archive.write_error == ""
    archive.close()

    n_pages = sum(steps) // N_PAGE
    archive = Archive(kind)
    archive.open_file(path)
    assert path.stat().st_size == HEADER + n_pages * archive.page_bytes()
    whole = {p: token for p, token in tokens.items() if p < n_pages * N_PAGE}
    assert_holds(archive, whole)
    assert archive.drop_damaged() == 0
    append(archive, whole, rng, 100)
    assert_holds(archive, whole)


def test_a_partly_written_page_is_overwritten(rng: np.random.Generator, path: Path) -> None:
    tokens = written(path, rng, 3 * N_PAGE)
    whole = path.read_bytes()
    size = Archive(layers=SMALL).page_bytes()
    before = {p: token for p, token in tokens.items() if p < 2 * N_PAGE}
    going_on = {*rng.choice(size, 20, replace=False).tolist()}
    for cut in sorted({*range(0, size, 7), *going_on}):
        with path.open("r+b") as file:
            file.truncate(HEADER + 2 * size + cut)
        archive = opened(path)
        assert archive.held == range(2 * N_PAGE)
        if cut in going_on:
            after = dict(before)
            append(archive, after, rng, N_PAGE)
            archive.close()
            assert_file_holds(path, after)
            path.write_bytes(whole[: HEADER + 2 * size + cut])
        else:
            archive.close()
        with path.open("r+b") as file:
            file.seek(HEADER + 2 * size + cut)
            file.write(whole[HEADER + 2 * size + cut :])
    assert_file_holds(path, tokens)


def test_a_page_without_a_header_is_overwritten(rng: np.random.Generator, path: Path) -> None:
    """After a power cut the file can have its length but not all of its bytes."""
    tokens = written(path, rng, 3 * N_PAGE)
    whole = path.read_bytes()
    at = len(whole) - Archive(layers=SMALL).page_bytes()
    before = {p: token for p, token in tokens.items() if p < 2 * N_PAGE}
    for i in [*range(PAGE_HEADER), *range(0, PAGE_HEADER, 50)]:
        damaged = bytearray(whole)
        damaged[at + i] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        archive = opened(path)
        assert archive.held == range(2 * N_PAGE)
        archive.close()
    path.write_bytes(whole[:at] + bytes(len(whole) - at))
    archive = opened(path)
    append(archive, before, rng, N_PAGE)
    archive.close()
    assert_file_holds(path, before)


def test_rows_in_a_file_are_read_only(rng: np.random.Generator, path: Path) -> None:
    archive, tokens = opened(path), dict[int, Token]()
    append(archive, tokens, rng, N_PAGE + 1)
    with pytest.raises(ArchiveError, match="in the archive's file"):
        archive.set(3, random_token(rng, SMALL))
    assert_holds(archive, tokens)


def resident_file_bytes() -> int:
    """Return the bytes of mapped files that count as memory of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssFile:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_memory_of_pages_that_were_read_is_released(path: Path) -> None:
    archive = Archive(layers=((4, 128, 128),))
    archive.open_file(path)
    for _ in range(64):
        archive.call("extend", N_PAGE, pointer(np.zeros(N_PAGE, np.int32)), True)
        archive.call("end_extend")
    archive.close()
    archive = Archive(layers=((4, 128, 128),))
    archive.open_file(path)
    before, size = resident_file_bytes(), 64 * archive.page_bytes()
    for page, head in product(range(64), range(4)):
        archive.page(page, 0, head)
    assert resident_file_bytes() > before + size / 2
    archive.release()
    assert resident_file_bytes() < before + size / 4
    assert archive.drop_damaged() == 0  # reads all pages
    assert resident_file_bytes() < before + size / 4


@pytest.mark.parametrize(
    ("kind", "layers", "text", "reason"),
    [
        ("f16", SMALL, b"one of the texts", "is an archive of rows of another type"),
        ("f32", LAYERS, b"one of the texts", "is an archive of another model"),
        ("f32", ((1, 32, 64),), b"one of the texts", "is an archive of another model"),
        ("f32", SMALL, b"another of texts", "is the archive of another text"),
    ],
)
def test_a_file_of_another_archive_is_refused(
    rng: np.random.Generator,
    path: Path,
    kind: str,
    layers: tuple[tuple[int, int, int], ...],
    text: bytes,
    reason: str,
) -> None:
    written(path, rng, N_PAGE)
    before = path.read_bytes()
    archive = Archive(kind, layers=layers)
    with pytest.raises(ArchiveError, match=f"^{path} {reason}$"):
        archive.open_file(path, text)
    assert path.read_bytes() == before
    # the archive stays in memory
    tokens: dict[int, Token] = {}
    append(archive, tokens, rng, 70)
    assert_holds(archive, tokens)


def test_a_damaged_header_is_refused(rng: np.random.Generator, path: Path) -> None:
    written(path, rng, N_PAGE)
    whole = path.read_bytes()
    archive = Archive(layers=SMALL)
    for i in range(200):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(ArchiveError, match=r"is (not an|a damaged|an) archive"):
            archive.open_file(path)
        assert path.read_bytes() == damaged


def with_number(data: bytes, at: int, number: bytes) -> bytes:
    """Return the file with one number in its header replaced and a correct checksum."""
    result = bytearray(data)
    result[at : at + len(number)] = number
    numbers = 56 + 12 * len(SMALL)  # bytes before the checksum
    result[numbers : numbers + 8] = checksum(result[:numbers])
    return bytes(result)


@pytest.mark.parametrize(
    ("at", "number", "reason"),
    [
        (8, b"\x02\0\0\0", "is an archive of another version$"),  # keys may be rotated differently
        # page numbers used to overflow, so that pages overwrote each other
        (32, b"\xff" * 8, "damaged"),
    ],
    ids=["version", "limit above the maximum file size"],
)
def test_a_valid_header_with_a_wrong_number_is_refused(
    rng: np.random.Generator, path: Path, at: int, number: bytes, reason: str
) -> None:
    written(path, rng, 3 * N_PAGE)
    data = with_number(path.read_bytes(), at, number)
    path.write_bytes(data)
    with pytest.raises(ArchiveError, match=f"^{path} .*{reason}"):
        opened(path)
    assert path.read_bytes() == data


def test_only_an_archive_file_is_overwritten(rng: np.random.Generator, path: Path) -> None:
    opened(path).close()
    header = path.read_bytes()
    for n in range(0, HEADER, 7):
        path.write_bytes(header[:n])
        archive = opened(path)
        archive.close()
        assert path.read_bytes() == header
    for text in (b"\n", b"a letter", b"h2o columns", rng.bytes(5000)):
        path.write_bytes(text)
        with pytest.raises(ArchiveError, match="is not an archive"):
            opened(path)
        assert path.read_bytes() == text


def test_a_path_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "archive", "No such file or directory"),
        (Path("/dev/null"), "/dev/null is not a file"),
    ):
        with pytest.raises(ArchiveError, match=reason):
            opened(path)


def test_an_open_file_is_locked(path: Path) -> None:
    archive = opened(path)
    with pytest.raises(ArchiveError, match="is in use"):
        opened(path)
    archive.close()
    opened(path).close()
