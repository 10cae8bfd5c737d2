"""Archive files at their size limits, and after random operations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archive import (
    HEADER,
    N_PAGE,
    PADDING,
    SMALL,
    Archive,
    ArchiveError,
    Token,
    append,
    assert_file_holds,
    assert_holds,
    opened,
    random_token,
)
from full_disk import full_disk
from random_cases import Cases


def test_a_full_disk_loses_no_held_rows(rng: np.random.Generator, path: Path) -> None:
    size = Archive(layers=SMALL).page_bytes()
    for room in (0, 1, PADDING, PADDING + 1, size - 1, *rng.integers(0, size, 5).tolist()):
        path.unlink(missing_ok=True)
        archive, tokens = opened(path), dict[int, Token]()
        append(archive, tokens, rng, 2 * N_PAGE)
        with full_disk(HEADER + 2 * size + room):
            append(archive, tokens, rng, N_PAGE + 9)
        assert archive.write_error == f"{path} cannot be written: File too large"
        assert_holds(archive, tokens)
        with pytest.raises(ArchiveError, match="File too large"):
            archive.extend([random_token(rng, SMALL)])
        assert_holds(archive, tokens)
        state = archive.state()
        archive.close()

        archive = opened(path)
        assert archive.held == range(2 * N_PAGE)
        assert archive.read_state(state) == 0
        append(archive, tokens, rng, N_PAGE)
        assert_holds(archive, tokens)
        archive.clear()
        assert archive.write_error == ""
        archive.close()
        assert_file_holds(path, {p: tokens[p] for p in range(4 * N_PAGE)})


def test_a_partly_overwritten_page_is_dropped(rng: np.random.Generator, path: Path) -> None:
    """With a limit, a new page reuses the place of an old page."""
    size = Archive(layers=SMALL).page_bytes()
    archive, tokens = opened(path, max_pages=3), dict[int, Token]()
    for _ in range(5):
        append(archive, tokens, rng, N_PAGE)
    with full_disk(HEADER + 2 * size + size // 2):
        append(archive, tokens, rng, N_PAGE)
    assert "File too large" in archive.write_error
    assert_holds(archive, tokens)
    archive.close()
    archive = opened(path)
    assert_holds(archive, {p: tokens[p] for p in range(3 * N_PAGE, 5 * N_PAGE)})
    assert archive.drop_damaged() == 0


def test_the_file_size_stays_within_the_limit(rng: np.random.Generator, path: Path) -> None:
    archive, tokens = opened(path, max_pages=3), dict[int, Token]()
    for n in (100, 100, 700, 1, 130):
        append(archive, tokens, rng, n)
        assert_holds(archive, tokens)
    assert archive.numbers["n_dropped"] == min(tokens) > 0
    n_bytes = HEADER + 3 * archive.page_bytes()
    assert path.stat().st_size == n_bytes
    archive.close()

    archive = opened(path, max_pages=7)
    held = archive.held
    assert (held.start // N_PAGE, held.stop // N_PAGE) == (1031 // N_PAGE - 3, 1031 // N_PAGE)
    assert archive.numbers["n_dropped"] == held.start
    for _ in range(5):
        append(archive, {}, rng, 100)
        assert path.stat().st_size == n_bytes


Tokens = dict[int, Token]


class Model:
    """What an archive with a file must hold."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.text: Tokens = {}  # the whole text
        self.tokens: Tokens = {}  # the tokens that the archive holds
        self.file: dict[int, Tokens] = {}  # the pages in the file

    def begin(self) -> None:
        self.text, self.tokens = {}, {}

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
        """Record that missing whole pages are written to the file."""
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
        """Return whether a page in the file belongs to this text, as far as the text is known."""
        return all(self.text.get(p) is token for p, token in self.file[page].items())

    def found_before(self, page: int) -> dict[int, Tokens]:
        """Return how many consecutive pages before this page the file has."""
        found: dict[int, Tokens] = {}
        while page - 1 in self.file and self.has(page - 1):
            page -= 1
            found[page] = self.file[page]
        return found

    def hold(self, page: int, newer: Tokens) -> None:
        """Hold the tokens that the file has before a page, and all tokens from there on."""
        self.tokens = {}
        for _, tokens in sorted(self.found_before(page).items()):
            self.tokens |= tokens
        self.tokens |= newer
        self.drop()
        self.write()


def test_random_operations_match_the_model(cases: Cases, path: Path) -> None:
    for _, rng in cases(range(12)):
        path.unlink(missing_ok=True)
        max_pages = int(rng.integers(0, 6))
        archive, model = opened(path, max_pages), Model(max_pages)
        states: list[tuple[bytes, Tokens, Tokens, range]] = []
        for _ in range(25):
            step, p = rng.integers(12), archive.held.stop
            if step < 7:
                tokens = [random_token(rng, SMALL) for _ in range(rng.integers(1, 400))]
                archive.extend(tokens)
                model.extend({p + i: token for i, token in enumerate(tokens)})
            elif step == 7:
                archive.begin_at(int(rng.integers(0, 3)) * int(rng.integers(0, 400)))
                model.begin()
            elif step == 8:
                wanted = archive.held
                states.append((archive.state(), dict(model.text), dict(model.tokens), wanted))
            elif step == 9 and states:
                state, text, held, wanted = states[int(rng.integers(len(states)))]
                model.text = dict(text)
                page = wanted.stop // N_PAGE
                model.hold(page, {q: held[q] for q in held if q >= page * N_PAGE})
                first = min(model.tokens, default=wanted.stop)
                assert archive.read_state(state) == max(0, first - wanted.start)
            elif step > 9:
                archive.close()
                archive = opened(path)
                model.text = {q: token for page in model.file.values() for q, token in page.items()}
                model.hold(max(model.file, default=-1) + 1, {})
            assert_holds(archive, model.tokens)
            assert archive.drop_damaged() == 0
        archive.close()
