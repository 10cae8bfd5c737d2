"""Pages of a file that are missing or damaged: found, let go of, and computed again."""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from archive import (
    N_PAGE,
    PADDING,
    Archive,
    ArchiveError,
    Token,
    append,
    assert_holds,
    random_token,
)
from archive_files import HEADER, PAGE_HEADER, SMALL, opened
from checksums import checksum
from full_disk import full_disk
from random_cases import Cases

Tokens = dict[int, Token]


def computed_again(text: Tokens, rng: np.random.Generator) -> Tokens:
    """The same text; its rows are others, which tells them from what was there before."""
    return {p: replace(random_token(rng, SMALL), id=text[p].id) for p in text}


def pages_of(tokens: Tokens, pages: range | set[int]) -> Tokens:
    return {p: token for p, token in tokens.items() if p // N_PAGE in pages}


def page_at(native: ctypes.CDLL, page: int) -> int:
    """Where it begins in a file whose first page is page 0."""
    return HEADER + page * Archive(native, layers=SMALL).page_bytes()


def flip(path: Path, at: int, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def saved(
    native: ctypes.CDLL, path: Path, rng: np.random.Generator, n: int
) -> tuple[bytes, Tokens]:
    """The state of an archive in a file, which is closed, and its tokens."""
    archive, tokens = opened(native, path), dict[int, Token]()
    append(archive, tokens, rng, n)
    state = archive.state()
    archive.close()
    return state, tokens


def test_all_up_to_a_damaged_page_is_let_go_of(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    state, tokens = saved(native, path, rng, 3 * N_PAGE + 5)
    whole = path.read_bytes()
    size = Archive(native, layers=SMALL).page_bytes()
    for at in [*range(0, PAGE_HEADER, 41), *rng.integers(PADDING, size, 40).tolist()]:
        path.write_bytes(whole)
        flip(path, page_at(native, 1) + at, rng)
        archive = opened(native, path)
        assert archive.read_state(state) == 2 * N_PAGE
        assert_holds(archive, pages_of(tokens, {2, 3}))
        assert archive.lost == range(2 * N_PAGE)
        archive.close()


@pytest.mark.parametrize("number", ["begin", "first"])
def test_pages_that_say_other_things_of_their_archive_are_not_of_one(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path, number: str
) -> None:
    """The first of them was held, as if the archive had begun behind it or had no gap."""
    _, tokens = saved(native, path, rng, 3 * N_PAGE + 5)
    data = bytearray(path.read_bytes())
    at = page_at(native, 2)
    begin, first, count = struct.unpack_from("<3i", data, at + 12)
    if number == "begin":
        begin += 5
    else:
        first, count = first + 5, count - 5
    struct.pack_into("<3i", data, at + 12, begin, first, count)
    data[at + PAGE_HEADER - 8 : at + PAGE_HEADER] = checksum(data[at : at + PAGE_HEADER - 8])
    path.write_bytes(data)
    archive = opened(native, path)
    held = pages_of(tokens, {2})
    assert_holds(archive, {p: token for p, token in held.items() if p >= first})
    assert archive.numbers["n_dropped"] == first - begin
    archive.close()


def test_damage_that_came_later_is_found(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    """Whoever reads a page may ask once more whether it is what was written."""
    for at in (0, PAGE_HEADER - 1, PADDING, Archive(native, layers=SMALL).page_bytes() - 1):
        path.unlink(missing_ok=True)
        archive, tokens = opened(native, path), dict[int, Token]()
        append(archive, tokens, rng, 4 * N_PAGE + 9)
        with path.open("r+b") as file:
            file.seek(page_at(native, 2) + at)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))
        assert archive.drop_damaged() == 3 * N_PAGE
        assert archive.lost == range(3 * N_PAGE)
        assert_holds(archive, pages_of(tokens, {3, 4}))
        append(archive, tokens, rng, 100)
        archive.close()


def test_only_pages_that_need_it_are_computed_again(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    state, tokens = saved(native, path, rng, 6 * N_PAGE + 5)
    again = computed_again(tokens, rng)
    flip(path, page_at(native, 1) + PADDING, rng)  # rows
    flip(path, page_at(native, 3), rng)  # a header
    damaged = path.read_bytes()
    archive = opened(native, path)
    archive.read_state(state)
    assert archive.lost == range(4 * N_PAGE)
    archive.restore(again)
    assert archive.read_state(state) == 0
    assert archive.lost == range(0)
    assert_holds(archive, {**tokens, **pages_of(again, {1, 3})})
    archive.close()
    kept = path.read_bytes()
    for page in (0, 2, 4, 5):
        at = slice(page_at(native, page), page_at(native, page + 1))
        assert kept[at] == damaged[at]


def test_a_restoration_that_is_broken_off_changes_no_other_page(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    state, tokens = saved(native, path, rng, 4 * N_PAGE + 5)
    again = computed_again(tokens, rng)
    for page in (1, 2):
        flip(path, page_at(native, page) + PADDING, rng)
    archive = opened(native, path)
    archive.read_state(state)
    state = archive.state()  # which knows what is lost
    archive.restore({p: again[p] for p in range(2 * N_PAGE + 9)})
    # what is there again counts for the text behind it, as it did when that was read first
    assert_holds(
        archive, {**pages_of(tokens, {0}), **{p: again[p] for p in range(N_PAGE, 2 * N_PAGE + 9)}}
    )
    assert archive.read_state(state) == 3 * N_PAGE
    assert_holds(archive, pages_of(tokens, {3, 4}))
    archive.close()
    archive = opened(native, path)
    assert archive.read_state(state) == 3 * N_PAGE
    archive.restore(again)
    assert archive.read_state(state) == 0
    assert_holds(archive, {**tokens, **pages_of(again, {1, 2})})
    archive.close()


def test_another_text_restores_nothing(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    state, tokens = saved(native, path, rng, 4 * N_PAGE)
    flip(path, page_at(native, 1) + PADDING, rng)
    archive = opened(native, path)
    archive.read_state(state)
    archive.restore({p: random_token(rng, SMALL) for p in tokens})
    assert archive.read_state(state) == 2 * N_PAGE
    assert_holds(archive, pages_of(tokens, {2, 3}))
    archive.close()


def test_a_full_disk_ends_a_restoration(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    state, tokens = saved(native, path, rng, 4 * N_PAGE + 5)
    path.unlink()
    archive = opened(native, path)
    assert archive.read_state(state) == 4 * N_PAGE
    state = archive.state()
    with full_disk(page_at(native, 2) + 7), pytest.raises(ArchiveError, match="File too large"):
        archive.restore(tokens)
    assert archive.read_state(state) == 4 * N_PAGE
    assert archive.write_error == ""
    archive.restore(tokens)
    assert archive.read_state(state) == 0
    assert_holds(archive, tokens)
    archive.close()


def test_what_has_no_place_is_not_lost_but_gone(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    """In memory, behind the limit, or where a file that was lost was begun anew."""
    state, tokens = saved(native, path, rng, 4 * N_PAGE + 5)
    archive = Archive(native, layers=SMALL)
    assert archive.read_state(state) == 4 * N_PAGE
    assert len(archive.lost) == 0
    with pytest.raises(ArchiveError, match="restored to a file"):
        archive.restore(tokens)
    archive.close()
    path.unlink()
    archive = opened(native, path)
    archive.read_state(state)
    assert archive.lost == range(4 * N_PAGE)
    append(archive, {}, rng, 2 * N_PAGE)
    assert len(archive.lost) == 0
    state = archive.state()
    assert archive.read_state(state) == 0
    archive.close()


def damage_anything(path: Path, size: int, rng: np.random.Generator) -> None:
    """Bits of some pages, all of the file, or its end; or nothing."""
    n_places = (path.stat().st_size - HEADER) // size
    for place in rng.integers(0, n_places, rng.integers(0, 5)).tolist() if n_places else []:
        in_header = rng.integers(2)
        at = rng.integers(PAGE_HEADER) if in_header else rng.integers(PADDING, size)
        flip(path, HEADER + place * size + int(at), rng)
    kind = rng.integers(6)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        os.truncate(path, HEADER + int(rng.integers(n_places * size + 1)))


def test_any_damage_is_made_good(native: ctypes.CDLL, cases: Cases, path: Path) -> None:
    for _, rng in cases(range(60)):
        path.unlink(missing_ok=True)
        max_pages = int(rng.integers(0, 9))
        begin = int(rng.choice([0, rng.integers(400), 2**31 - 4000]))
        archive, text = opened(native, path, max_pages), dict[int, Token]()
        archive.begin_at(begin)
        for _ in range(rng.integers(1, 12)):
            new = [random_token(rng, SMALL) for _ in range(rng.integers(1, 240))]
            text |= {archive.held.stop + i: token for i, token in enumerate(new)}
            archive.extend(new)
        state, held, size = archive.state(), archive.held, archive.page_bytes()
        archive.close()
        damage_anything(path, size, rng)

        archive = opened(native, path, max_pages)
        n_lost = archive.read_state(state)
        kept = range(held.start + n_lost, held.stop)
        assert_holds(archive, {p: text[p] for p in kept})
        assert len(archive.lost) == n_lost
        tokens = {p: text[p] for p in held}
        if n_lost > 0:
            again = computed_again(text, rng)
            archive.restore(again, int(rng.integers(1, 600)))
            assert archive.read_state(state) == 0
            mended = [p for p in held if np.array_equal(archive.get(p).k, again[p].k)]
            assert not mended or mended[-1] < kept.start
            tokens |= {p: again[p] for p in mended}
            assert_holds(archive, tokens)
        append(archive, tokens, rng, 400)
        assert archive.drop_damaged() == 0
        assert_holds(archive, tokens)
        archive.close()
