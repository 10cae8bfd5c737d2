"""Missing or damaged pages of an archive file are detected and dropped."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from archive import (
    HEADER,
    N_PAGE,
    PADDING,
    PAGE_HEADER,
    SMALL,
    Archive,
    Token,
    append,
    assert_holds,
    opened,
    random_token,
)
from checksums import checksum
from random_cases import Cases

Tokens = dict[int, Token]


def pages_of(tokens: Tokens, pages: range | set[int]) -> Tokens:
    return {p: token for p, token in tokens.items() if p // N_PAGE in pages}


def page_at(page: int) -> int:
    """Return the page's offset in a file that starts with page 0."""
    return HEADER + page * Archive(layers=SMALL).page_bytes()


def flip(path: Path, at: int, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def saved(path: Path, rng: np.random.Generator, n: int) -> tuple[bytes, Tokens]:
    """Write an archive to a file, close it and return its state and its tokens."""
    archive, tokens = opened(path), dict[int, Token]()
    append(archive, tokens, rng, n)
    state = archive.state()
    archive.close()
    return state, tokens


@pytest.mark.parametrize("number", ["begin", "first"])
def test_pages_with_inconsistent_headers_are_dropped(
    rng: np.random.Generator, path: Path, number: str
) -> None:
    """The first of them used to be accepted as if the archive started after it or had no gap."""
    _, tokens = saved(path, rng, 3 * N_PAGE + 5)
    data = bytearray(path.read_bytes())
    at = page_at(2)
    begin, first, count = struct.unpack_from("<3i", data, at + 12)
    if number == "begin":
        begin += 5
    else:
        first, count = first + 5, count - 5
    struct.pack_into("<3i", data, at + 12, begin, first, count)
    data[at + PAGE_HEADER - 8 : at + PAGE_HEADER] = checksum(data[at : at + PAGE_HEADER - 8])
    path.write_bytes(data)
    archive = opened(path)
    held = pages_of(tokens, {2})
    assert_holds(archive, {p: token for p, token in held.items() if p >= first})
    assert archive.numbers["n_dropped"] == first - begin


def test_damage_after_opening_is_detected(rng: np.random.Generator, path: Path) -> None:
    """A reader can check a page again after reading it."""
    for at in (0, PAGE_HEADER - 1, PADDING, Archive(layers=SMALL).page_bytes() - 1):
        path.unlink(missing_ok=True)
        archive, tokens = opened(path), dict[int, Token]()
        append(archive, tokens, rng, 4 * N_PAGE + 9)
        with path.open("r+b") as file:
            file.seek(page_at(2) + at)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))
        assert archive.drop_damaged() == 3 * N_PAGE
        assert_holds(archive, pages_of(tokens, {3, 4}))
        append(archive, tokens, rng, 100)
        archive.close()


def damage_randomly(path: Path, size: int, rng: np.random.Generator) -> None:
    """Flip bits in some pages, in the whole file or truncate it, or do nothing."""
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


def test_random_damage_never_returns_wrong_rows(cases: Cases, path: Path) -> None:
    for _, rng in cases(range(30)):
        path.unlink(missing_ok=True)
        max_pages = int(rng.integers(0, 9))
        begin = int(rng.choice([0, rng.integers(400), 2**31 - 4000]))
        archive, text = opened(path, max_pages), dict[int, Token]()
        archive.begin_at(begin)
        for _ in range(rng.integers(1, 12)):
            new = [random_token(rng, SMALL) for _ in range(rng.integers(1, 240))]
            text |= {archive.held.stop + i: token for i, token in enumerate(new)}
            archive.extend(new)
        state, held, size = archive.state(), archive.held, archive.page_bytes()
        archive.close()
        damage_randomly(path, size, rng)

        archive = opened(path, max_pages)
        n_lost = archive.read_state(state)
        tokens = {p: text[p] for p in range(held.start + n_lost, held.stop)}
        assert_holds(archive, tokens)
        append(archive, tokens, rng, 400)
        assert archive.drop_damaged() == 0
        assert_holds(archive, tokens)
        archive.close()
