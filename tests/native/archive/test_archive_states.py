"""A saved state restores an archive, and no state can damage it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from archive import (
    LAYERS,
    N_PAGE,
    Archive,
    ArchiveError,
    Token,
    append,
    assert_holds,
)

# size of the numbers before the pages
NUMBERS = {"magic": (0, "Q"), "begin": (16, "i"), "first": (20, "i"), "next": (24, "i")}
NUMBERS |= {"page": (28, "I"), "text": (32, "Q")}
SIZE = 40


def test_a_state_larger_than_the_limit_is_loaded(rng: np.random.Generator) -> None:
    archive, tokens = Archive(), dict[int, Token]()
    n = 4 * N_PAGE + 44
    append(archive, tokens, rng, n)
    other = Archive(max_bytes=2 * archive.page_bytes())
    n_missing = 3 * N_PAGE
    assert other.read_state(archive.state()) == n_missing
    assert other.numbers["n_dropped"] == n_missing
    assert_holds(other, {p: tokens[p] for p in range(n_missing, n)})


def test_a_state_from_memory_is_loaded_into_a_file(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    archive, tokens = Archive(), dict[int, Token]()
    append(archive, tokens, rng, 2 * N_PAGE + 22)
    other = Archive()
    other.open_file(tmp_path / "archive")
    append(other, {}, rng, 5 * N_PAGE)
    assert other.read_state(archive.state()) == 0
    assert_holds(other, tokens)
    other.close()
    other = Archive()
    other.open_file(tmp_path / "archive")
    assert_holds(other, {p: tokens[p] for p in range(2 * N_PAGE)})


def test_a_state_without_its_file_starts_after_the_missing_pages(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    archive, tokens = Archive(), dict[int, Token]()
    archive.open_file(tmp_path / "archive")
    append(archive, tokens, rng, 2 * N_PAGE + 22)
    state = archive.state()
    assert len(state) == SIZE + archive.page_bytes()
    other = Archive()
    assert other.read_state(state) == 2 * N_PAGE
    tail = {p: tokens[p] for p in range(2 * N_PAGE, 2 * N_PAGE + 22)}
    assert_holds(other, tail)
    append(other, tail, rng, 2 * N_PAGE)
    assert_holds(other, tail)


def changed(state: bytes, **numbers: int) -> bytes:
    result = bytearray(state)
    for name, value in numbers.items():
        struct.pack_into(f"={NUMBERS[name][1]}", result, NUMBERS[name][0], value)
    return bytes(result)


def test_an_invalid_state_changes_nothing(rng: np.random.Generator) -> None:
    archive, tokens = Archive(), dict[int, Token]()
    begin, end = N_PAGE + 6, 2 * N_PAGE + 42
    archive.begin_at(begin)
    append(archive, tokens, rng, end - begin)  # pages 1 and 2
    state, page = archive.state(), archive.page_bytes()
    other, others = Archive(), dict[int, Token]()
    append(other, others, rng, N_PAGE + 26)
    for damaged, reason in (
        (changed(state, magic=1), "another version"),
        (changed(state, begin=-1), "positions that are out of range"),
        (changed(state, begin=begin + 1), "positions that are out of range"),
        (changed(state, first=end + 1), "positions that are out of range"),
        (changed(state, next=-(2**31)), "positions that are out of range"),
        (changed(state, page=0), "pages that are out of range"),
        (changed(state, page=3), "pages that are out of range"),
        (changed(state, page=2**32 - 1), "pages that are out of range"),
        (changed(state, first=end), "pages that are out of range"),
        (changed(state, page=2), "inconsistent pages"),
        (changed(state, begin=begin - 1), "inconsistent pages"),
        (changed(state, first=begin + 1), "inconsistent pages"),
        (changed(state, next=end + 1), "inconsistent pages"),
        (changed(state, next=3 * N_PAGE + 1), "inconsistent pages"),
        (changed(state, next=2**31 - 1), "inconsistent pages"),
        (changed(state, text=1), "inconsistent pages"),
        (state[:SIZE] + state[SIZE + page :] + state[SIZE : SIZE + page], "inconsistent pages"),
        (state[: SIZE - 1], "has an end"),
        (state[:-1], "has an end"),
    ):
        with pytest.raises(ArchiveError, match=reason):
            other.read_state(damaged)
        assert_holds(other, others)


@pytest.mark.parametrize(("kind", "layers"), [("f16", LAYERS), ("f32", LAYERS[:1])])
def test_a_state_of_another_archive_is_refused(
    kind: str, layers: tuple[tuple[int, int, int], ...]
) -> None:
    archive, other = Archive(), Archive(kind, layers=layers)
    with pytest.raises(ArchiveError, match="of another model or type"):
        other.read_state(archive.state())
