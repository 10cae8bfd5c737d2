"""The archive in a file at its limits, and after any steps."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
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
    compile_archive,
    random_token,
)
from archive_files import HEADER, SMALL, assert_file_holds, opened
from random_cases import Cases


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    return compile_archive()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


# ---- limits ----


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    """Files cannot become longer than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_nothing_that_is_held(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    size = Archive(native, layers=SMALL).page_bytes()
    for room in (0, 1, PADDING, PADDING + 1, size - 1, *rng.integers(0, size, 5).tolist()):
        path.unlink(missing_ok=True)
        archive, tokens = opened(native, path), dict[int, Token]()
        append(archive, tokens, rng, 2 * N_PAGE)
        with full_disk(HEADER + 2 * size + room):
            append(archive, tokens, rng, N_PAGE + 9)
        assert archive.write_error == f"{path} cannot be written: File too large"
        assert_holds(archive, tokens)
        with pytest.raises(ArchiveError, match="File too large"):
            archive.extend([random_token(rng, 0, SMALL)])
        assert_holds(archive, tokens)
        state = archive.state()
        archive.close()

        archive = opened(native, path)
        assert archive.held == range(2 * N_PAGE)
        assert archive.read_state(state) == 0
        append(archive, tokens, rng, N_PAGE)
        assert_holds(archive, tokens)
        archive.clear()
        assert archive.write_error == ""
        archive.close()
        assert_file_holds(native, path, {p: tokens[p] for p in range(4 * N_PAGE)})


def test_a_page_that_was_written_over_in_part_is_gone(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    """With a limit, a new page comes to where an old one was."""
    size = Archive(native, layers=SMALL).page_bytes()
    archive, tokens = opened(native, path, max_pages=3), dict[int, Token]()
    for _ in range(5):
        append(archive, tokens, rng, N_PAGE)
    with full_disk(HEADER + 2 * size + size // 2):
        append(archive, tokens, rng, N_PAGE)
    assert "File too large" in archive.write_error
    assert_holds(archive, tokens)
    archive.close()
    archive = opened(native, path)
    assert_holds(archive, {p: tokens[p] for p in range(3 * N_PAGE, 5 * N_PAGE)})
    assert archive.is_sound(3) == archive.is_sound(4) == (True, True)
    archive.close()


def test_the_limit_is_that_of_the_file(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    archive, tokens = opened(native, path, max_pages=3), dict[int, Token]()
    for n in (100, 100, 700, 1, 130):
        append(archive, tokens, rng, n)
        assert_holds(archive, tokens)
    assert archive.numbers["n_dropped"] == min(tokens) > 0
    n_bytes = HEADER + 3 * archive.page_bytes()
    assert path.stat().st_size == n_bytes
    archive.close()

    archive = opened(native, path, max_pages=7)
    assert archive.numbers["max_bytes"] == 3 * archive.page_bytes()
    held = archive.held
    assert (held.start // N_PAGE, held.stop // N_PAGE) == (1031 // N_PAGE - 3, 1031 // N_PAGE)
    assert archive.numbers["n_dropped"] == held.start
    archive.close_file()
    assert archive.numbers["max_bytes"] == 7 * archive.page_bytes()
    assert path.stat().st_size == n_bytes
    archive.close()


def test_positions_go_to_their_end(
    native: ctypes.CDLL, rng: np.random.Generator, path: Path
) -> None:
    most = 2**31 - 1
    archive, tokens = opened(native, path), dict[int, Token]()
    archive.begin_at(most - 200)
    append(archive, tokens, rng, 200)
    assert_holds(archive, tokens)
    state = archive.state()
    archive.close()
    assert_file_holds(native, path, {p: token for p, token in tokens.items() if p < most - 63})

    archive = opened(native, path)
    assert archive.read_state(state) == 0
    assert_holds(archive, tokens)
    archive.close()


# ---- all of it ----


Tokens = dict[int, Token]


class Model:
    """What an archive with a file has to hold."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.text: Tokens = {}  # all of it
        self.tokens: Tokens = {}  # what is held
        self.file: dict[int, Tokens] = {}  # pages

    def begin(self) -> None:
        self.text, self.tokens = {}, {}

    def set_back(self, p: int) -> None:
        for of in (self.text, self.tokens):
            for gone in [q for q in of if q >= p]:
                del of[gone]

    def extend(self, tokens: Tokens) -> None:
        self.text |= tokens
        self.tokens |= tokens
        self.drop()
        self.write()

    def drop(self) -> None:
        pages = sorted({p // N_PAGE for p in self.tokens})
        for page in pages[: -self.max_pages] if self.max_pages else []:
            for p in range(page * N_PAGE, (page + 1) * N_PAGE):
                self.tokens.pop(p, None)

    def write(self) -> None:
        """Whole pages that the file does not have are written there."""
        pages: dict[int, Tokens] = {}
        for p, token in self.tokens.items():
            pages.setdefault(p // N_PAGE, {})[p] = token
        end = (max(self.tokens, default=-1) + 1) // N_PAGE
        new = [page for page in pages if page < end and self.file.get(page) is None]
        new += [page for page in pages if page < end and page not in new and not self.has(page)]
        if new:
            first = min(new)
            before = self.found_before(first)
            self.file = {page: before[page] for page in sorted(before)}
            self.file |= {page: pages[page] for page in pages if first <= page < end}
            for gone in [*self.file][: -self.max_pages] if self.max_pages else []:
                del self.file[gone]

    def has(self, page: int) -> bool:
        """Whether a page of the file is of this text, as far as the text is known."""
        return all(self.text.get(p) is token for p, token in self.file[page].items())

    def found_before(self, page: int) -> dict[int, Tokens]:
        """Pages in the file that this one of the text follows."""
        found: dict[int, Tokens] = {}
        while page - 1 in self.file and self.has(page - 1):
            page -= 1
            found[page] = self.file[page]
        return found

    def hold(self, page: int, newer: Tokens) -> None:
        """Of the text what the file has before a page, and tokens from there on."""
        self.tokens = {}
        for _, tokens in sorted(self.found_before(page).items()):
            self.tokens |= tokens
        self.tokens |= newer
        self.drop()
        self.write()


def test_any_steps_leave_what_the_model_has(native: ctypes.CDLL, cases: Cases, path: Path) -> None:
    for _, rng in cases(range(20)):
        path.unlink(missing_ok=True)
        max_pages = int(rng.integers(0, 6))
        archive, model = opened(native, path, max_pages), Model(max_pages)
        states: list[tuple[bytes, Tokens, Tokens, int]] = []
        for _ in range(25):
            step, p = rng.integers(12), archive.held.stop
            if step < 6:
                shift = int(rng.integers(0, 3))
                tokens = [random_token(rng, shift, SMALL) for _ in range(rng.integers(1, 200))]
                archive.extend(tokens)
                model.extend({p + i: token for i, token in enumerate(tokens)})
            elif step == 6:
                archive.begin_at(int(rng.integers(0, 3)) * int(rng.integers(0, 200)))
                model.begin()
            elif step == 7 and model.tokens:
                page = int(rng.integers(archive.held.start // N_PAGE, p // N_PAGE + 2))
                archive.truncate_to(page)
                model.set_back(page * N_PAGE)
            elif step == 8:
                states.append((archive.state(), dict(model.text), dict(model.tokens), p))
            elif step == 9 and states:
                state, text, held, p = states[int(rng.integers(len(states)))]
                model.text = dict(text)
                page = p // N_PAGE
                model.hold(page, {q: held[q] for q in held if q >= page * N_PAGE})
                missing = max(0, min(model.tokens, default=p) - min(held, default=p))
                assert archive.read_state(state) == missing
            elif step > 9:
                archive.close()
                archive = opened(native, path)
                model.text = {q: token for page in model.file.values() for q, token in page.items()}
                model.hold(max(model.file, default=-1) + 1, {})
            assert_holds(archive, model.tokens)
            assert all(
                archive.is_sound(page) == (True, True)
                for page in range(archive.numbers["page_begin"], archive.numbers["page_end"])
            )
        archive.close()
