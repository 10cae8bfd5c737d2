"""Pages whose rows are all dropped take almost no memory and are kept in states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archive import (
    N_PAGE,
    SMALL,
    Archive,
    ArchiveError,
    Token,
    append,
    assert_holds,
    elements,
    opened,
)
from random_cases import Cases

# 16 pages without rows count as one page; each is a header.
A_PAGE, HEADER = 16, 560
NOTHING = Token(0, *(np.zeros(elements(SMALL, part), np.float32) for part in (1, 2)))

Tokens = dict[int, Token]


def drop(archive: Archive, tokens: Tokens, p0: int, p1: int) -> None:
    """Drop the rows of both streams in all whole pages between two positions."""
    archive.drop_rows(p0, p1)
    held = archive.held
    for page in range(held.start // N_PAGE, held.stop // N_PAGE):
        of_page = range(max(page * N_PAGE, held.start), (page + 1) * N_PAGE)
        if of_page.start >= p0 and of_page.stop <= p1:
            tokens |= dict.fromkeys(of_page, NOTHING)


def n_whole(tokens: Tokens) -> int:
    """Count the pages that have rows."""
    return len({p // N_PAGE for p, token in tokens.items() if token is not NOTHING})


def n_empty(tokens: Tokens) -> int:
    return len({p // N_PAGE for p, token in tokens.items() if token is NOTHING})


def assert_takes(archive: Archive, tokens: Tokens) -> None:
    size = n_whole(tokens) * archive.page_bytes() + n_empty(tokens) * HEADER
    assert archive.numbers["n_bytes"] == size


def test_pages_without_rows_count_towards_the_limit(rng: np.random.Generator) -> None:
    size = Archive(layers=SMALL).page_bytes()
    archive, tokens = Archive(layers=SMALL, max_bytes=2 * size), Tokens()
    for _ in range(2 * A_PAGE + 3):
        append(archive, tokens, rng, N_PAGE)
        drop(archive, tokens, 0, archive.held.stop)
    assert archive.held.start == 3 * N_PAGE
    assert_takes(archive, tokens)


def test_a_state_keeps_pages_without_rows(rng: np.random.Generator, path: Path) -> None:
    archive, tokens = Archive(layers=SMALL), Tokens()
    append(archive, tokens, rng, 4 * N_PAGE + 9)
    whole = len(archive.state())
    drop(archive, tokens, 0, 3 * N_PAGE)
    state = archive.state()
    assert whole - len(state) == 3 * (archive.page_bytes() - HEADER)
    other = Archive(layers=SMALL)
    assert other.read_state(state) == 0
    assert_holds(other, tokens)
    assert_takes(other, tokens)
    assert other.state() == state
    append(other, tokens, rng, N_PAGE)
    assert_holds(other, tokens)

    in_file = opened(path)
    assert in_file.read_state(state) == 0
    assert in_file.held == archive.held
    assert_holds(
        in_file, {p: tokens[p] for p in in_file.held} | readable_tokens(in_file, 3 * N_PAGE)
    )
    drop(in_file, {}, 0, 4 * N_PAGE)
    assert in_file.numbers["n_bytes"] == 5 * in_file.page_bytes()
    in_file.close()
    in_file = opened(path)
    assert in_file.held == range(4 * N_PAGE)
    assert in_file.drop_damaged() == 0


def readable_tokens(archive: Archive, n: int) -> Tokens:
    """Return the tokens without rows whose numbers can be read: in a file the pages are whole."""
    return {p: Token(archive.get(p).id, NOTHING.k, NOTHING.v) for p in range(n)}


def test_pages_moved_to_a_file_are_whole_again(rng: np.random.Generator, path: Path) -> None:
    archive, tokens = Archive(layers=SMALL), Tokens()
    append(archive, tokens, rng, 3 * N_PAGE + 9)
    drop(archive, tokens, 0, 2 * N_PAGE)
    archive.open_file(path, moves=True)
    assert_holds(archive, tokens | readable_tokens(archive, 2 * N_PAGE))
    append(archive, tokens, rng, N_PAGE)
    archive.close()
    archive = opened(path)
    assert archive.held == range(4 * N_PAGE)
    assert archive.drop_damaged() == 0


def test_an_invalid_state_is_refused(rng: np.random.Generator) -> None:
    archive = Archive(layers=SMALL)
    append(archive, {}, rng, N_PAGE + 9)
    state, first = archive.state(), 40
    last = first + archive.page_bytes()
    inverted = bytes(255 - byte for byte in state[last : last + 8])
    damaged = state[:last] + inverted + state[last + 8 : last + HEADER]
    with pytest.raises(ArchiveError, match="incomplete pages without rows"):
        Archive(layers=SMALL).read_state(damaged)
    with pytest.raises(ArchiveError, match="has an end"):
        Archive(layers=SMALL).read_state(state[: first + HEADER])


def test_random_operations_match_the_model(cases: Cases) -> None:
    size = Archive(layers=SMALL).page_bytes()
    for _, rng in cases(range(16)):
        limit, begin = int(rng.integers(0, 6)), 0
        archive, tokens = Archive(layers=SMALL, max_bytes=limit * size), Tokens()
        for _ in range(25):
            step = rng.integers(8)
            if step < 4:
                append(archive, tokens, rng, int(rng.integers(1, 400)))
            elif step < 6:
                p0, p1 = sorted(rng.integers(0, archive.held.stop + 50, 2).tolist())
                drop(archive, tokens, p0, p1)
            elif step == 6:
                state = archive.state()
                archive.clear()
                assert archive.read_state(state) == 0
            elif rng.integers(4) == 0:
                archive.clear()
                begin = int(rng.choice([0, rng.integers(600)]))
                if begin:
                    archive.begin_at(begin)
                tokens.clear()
                assert archive.held == range(begin, begin)
            assert_holds(archive, tokens)
            assert_takes(archive, tokens)
            numbers = archive.numbers
            assert numbers["n_dropped"] == numbers["first"] - begin
            assert numbers["page_end"] - numbers["page_begin"] == n_whole(tokens) + n_empty(tokens)
            assert not limit or n_whole(tokens) + n_empty(tokens) // A_PAGE <= limit
