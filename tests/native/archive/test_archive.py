"""The recall archive returns rows as they were stored, before and after pages are removed."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from gguf.quants import quantize

from archive import (
    LAYERS,
    N_PAGE,
    Archive,
    ArchiveError,
    Token,
    append,
    assert_holds,
    random_token,
)
from compiled import pointer
from random_cases import Cases
from row_types import TYPES
from scarce_memory import limits_memory


@pytest.mark.parametrize("kind", TYPES)
def test_archive_returns_stored_rows(rng: np.random.Generator, kind: str) -> None:
    archive, tokens = Archive(kind), dict[int, Token]()
    for n in (1, N_PAGE - 2, 1, 3, 2 * N_PAGE + 2):
        append(archive, tokens, rng, n)
        assert_holds(archive, tokens)
    assert archive.numbers["type"] == TYPES[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_a_head_are_contiguous(rng: np.random.Generator, kind: str) -> None:
    archive, tokens = Archive(kind), dict[int, Token]()
    append(archive, tokens, rng, N_PAGE + 5)
    for page, n in ((0, N_PAGE), (1, 5)):
        at_k = at_v = 0
        for layer, (n_head, n_k, n_v) in enumerate(LAYERS):
            for head in range(n_head):
                k, v = archive.page(page, layer, head)
                for i in range(n):
                    token = tokens[page * N_PAGE + i]
                    for row, given in ((k[i], token.k[at_k:][:n_k]), (v[i], token.v[at_v:][:n_v])):
                        stored = quantize(given, TYPES[kind]).view(np.uint8)
                        np.testing.assert_array_equal(row, stored)
                assert not k[n:].any()
                assert not v[n:].any()
                at_k, at_v = at_k + n_k, at_v + n_v


def test_rows_without_tokens_read_as_zero_even_in_reused_memory(cases: Cases) -> None:
    for _, rng in cases(range(5)):
        plain, shared = Archive("q8_0"), Archive("q8_0")
        shared.share()
        begin = int(rng.integers(0, 300))
        for archive in (plain, shared):
            archive.begin_at(begin)
        for n in rng.integers(1, 3 * N_PAGE, 5):
            tokens = [random_token(rng) for _ in range(n)]
            has_rows = bool(rng.integers(4))
            for archive in (plain, shared):
                archive.extend(tokens, has_rows=has_rows)
            assert shared.state() == plain.state()
            if rng.integers(2):  # the allocator returns freed pages with their old contents
                for archive in (plain, shared):
                    archive.drop_rows(begin, archive.held.stop)


def test_memory_grows_only_by_pages_that_are_not_shared(rng: np.random.Generator) -> None:
    archive, tokens = Archive(), dict[int, Token]()
    n_made = archive.share(most=3)
    for _ in range(3):
        append(archive, tokens, rng, 8 * N_PAGE)  # allocated in one block
    assert archive.is_shared
    append(archive, tokens, rng, N_PAGE)
    assert n_made[0] == 1
    assert n_made[1] == 3
    assert not archive.is_shared
    assert_holds(archive, tokens)
    archive.clear()
    append(archive, {}, rng, 1)
    assert n_made[0] == 2
    assert not archive.is_shared


def test_a_limit_below_one_page_is_refused() -> None:
    page = Archive().page_bytes()
    with pytest.raises(ArchiveError, match=f"limit of {page - 1} bytes is less than .* {page}$"):
        Archive(max_bytes=page - 1)


def test_positions_end_at_the_maximum(rng: np.random.Generator) -> None:
    most = 2**31 - 1
    archive, tokens = Archive(max_bytes=5 * Archive().page_bytes()), {}
    archive.begin_at(most - 200)
    append(archive, tokens, rng, 200)
    assert_holds(archive, tokens)
    assert max(tokens) == most - 1
    with pytest.raises(ArchiveError, match="ends at position 2147483647"):
        archive.extend([random_token(rng)])
    assert_holds(archive, tokens)


@limits_memory
def test_a_failed_allocation_leaves_the_archive_unchanged() -> None:
    archive = Archive(layers=((32, 2048, 2048),))
    ids = np.zeros(64 * N_PAGE, np.int32)  # possibly more than this process may allocate
    archive.call("extend", 10, pointer(ids), True)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 5 * archive.page_bytes() // 2, hard))
    try:
        with pytest.raises(ArchiveError, match="bad_alloc"):
            archive.call("extend", ids.size, pointer(ids), True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert archive.held == range(10)
    assert archive.numbers["page_end"] == 1
    archive.call("extend", N_PAGE, pointer(ids), True)
    assert archive.held == range(N_PAGE + 10)


def test_rows_outside_the_archive_are_refused(rng: np.random.Generator) -> None:
    archive = Archive()
    archive.begin_at(N_PAGE + 10)
    archive.extend([random_token(rng)] * 3)
    for p in (0, N_PAGE + 9, N_PAGE + 13, -1):
        with pytest.raises(ArchiveError, match="that the archive does not hold"):
            archive.set(p, random_token(rng))
    for page in (0, 2):
        with pytest.raises(ArchiveError, match="that the archive does not hold"):
            archive.page(page, 0, 0)
    with pytest.raises(ArchiveError, match="before the text"):
        archive.begin_at(-1)


@pytest.mark.parametrize(
    ("kind", "layers", "reason"),
    [
        (3, LAYERS, "use f32, f16, q8_0 or q4_0$"),
        ("q8_0", ((1, 64, 48),), "row of 48 elements is not whole blocks of 32"),
        ("q4_0", ((1, 64, 64), (1, 16, 64)), "row of 16 elements is not whole blocks of 32"),
        ("f16", ((1, 0, 64),), "row of 0 elements"),
    ],
)
def test_unsupported_row_types_are_refused(
    kind: str | int, layers: tuple[tuple[int, int, int], ...], reason: str
) -> None:
    with pytest.raises(ArchiveError, match=reason):
        Archive(kind, layers=layers)
