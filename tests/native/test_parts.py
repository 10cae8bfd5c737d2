"""Parts of the native library without tensors, tested separately."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compiled import NATIVE, compile_library, int32s, pointer, sizes_of
from pyh2o.policies import NATIVE_POLICIES, POLICIES, Policy
from random_cases import Cases
from research.reference import select


@pytest.fixture(scope="module")
def parts() -> ctypes.CDLL:
    sources = [
        Path(__file__).parent / "parts" / "parts.cpp",
        *(NATIVE / "src" / "cache" / f"h2o-{name}.cpp" for name in ("plan", "row-positions")),
        *(NATIVE / "src" / "policies").glob("*.cpp"),
    ]
    return compile_library("parts", sources)


def native_select(
    parts: ctypes.CDLL,
    scores: npt.NDArray[np.float64],
    positions: npt.NDArray[np.int64],
    *,
    pinned: int,
    heavy: int,
    recent: int,
    spans: Sequence[tuple[int, int]] = (),
    starts: Sequence[int] = (),
) -> npt.NDArray[np.int64]:
    """Return the indices of the kept rows."""
    keep = np.full(scores.size, 9, dtype=np.uint8)
    native_spans, native_starts = int32s(spans), int32s(starts)
    native_positions = int32s(positions)
    parts.select_rows(
        sizes_of(pinned + heavy + recent, recent, pinned),
        *(pointer(native_spans), len(spans)),
        *(pointer(native_starts), len(starts)),
        *(pointer(scores), pointer(native_positions), scores.size, pointer(keep)),
    )
    assert set(keep.tolist()) <= {0, 1}
    return np.flatnonzero(keep)


def test_native_and_reference_keep_the_same_rows(parts: ctypes.CDLL, cases: Cases) -> None:
    for _, rng in cases(range(400)):
        n_rows = int(rng.integers(0, 60))
        rule: dict[str, Any] = {
            "pinned": int(rng.integers(0, 20)),
            "heavy": int(rng.integers(0, 20)),
            "recent": int(rng.integers(1, 20)),
        }
        # half of the cases without spans, half without segments
        borders = np.sort(rng.choice(110, 2 * int(rng.integers(0, 4)), replace=False))
        if rng.integers(2):
            rule["spans"] = [(int(p0), int(p1)) for p0, p1 in borders.reshape(-1, 2)]
        if rng.integers(2):
            starts = rng.choice(np.arange(1, 110), int(rng.integers(1, 5)), replace=False)
            rule["starts"] = np.sort(starts).tolist()
        positions = rng.choice(100, n_rows, replace=False)
        # few distinct values, so that equal scores are common
        scores = rng.integers(0, 8, n_rows) / 4
        expected = select(scores, positions, **rule)
        np.testing.assert_array_equal(
            native_select(parts, scores, positions, **rule), np.sort(expected)
        )


def test_a_plan_is_refused_unless_every_row_has_a_cell(parts: ctypes.CDLL, cases: Cases) -> None:
    """More mandatory rows than cells would be moved past the end of the lists."""
    for _, rng in cases(range(100)):
        n_heads, n_cells = int(rng.integers(1, 5)), int(rng.integers(1, 40))
        n_keep = int(rng.integers(0, n_cells + 1))
        flags = np.zeros((n_heads, n_cells), dtype=np.uint8)
        flags[:, :n_keep] = 1
        flags = rng.permuted(flags, axis=1)
        shape = (n_heads, n_cells, n_keep)
        assert parts.make_plan(pointer(flags), *shape)
        others = np.flatnonzero(flags[0] == 0)
        if others.size:
            flags[0, rng.choice(others, int(rng.integers(1, others.size + 1)), False)] = 1
            assert not parts.make_plan(pointer(flags), *shape)


# Position, and index, width and height of a picture; width 0 means text.
Token = tuple[int, int, int, int]


def random_text(rng: np.random.Generator) -> list[Token]:
    """Return text and pictures; sometimes the tail is removed and replaced."""
    tokens: list[Token] = []
    position = 0
    for _ in range(int(rng.integers(1, 9))):
        width, height = (int(size) for size in rng.integers(1, 7, 2))
        piece = [(number, width, height) for number in range(width * height)]
        if rng.integers(2):
            piece = [(0, 0, 0)] * int(rng.integers(1, 12))
        tokens += [(position + i, *place) for i, place in enumerate(piece)]
        position += len(piece)
        if rng.integers(3) == 0:
            n_kept = int(rng.integers(0, len(piece)))
            position -= len(piece) - n_kept
            piece = piece[n_kept:] if rng.integers(2) else [(0, 0, 0)]  # the rest again, or text
            tokens += [(position + i, *place) for i, place in enumerate(piece)]
            position += len(piece)
    return tokens


def rotary(tokens: Sequence[Token]) -> list[int]:
    """Return the rotation of every remaining token and of the next token."""
    places: list[tuple[int, int, int]] = []
    for position, *place in tokens:
        places[position:] = [(place[0], place[1], place[2])]
    result: list[int] = []
    now = n = 0  # after n tokens of a picture
    for i, place in enumerate(places):
        goes_on = n > 0 and place == (places[i - 1][0] + 1, *places[i - 1][1:])
        if not goes_on:
            now += min(n, max(places[i - 1][1:])) if n else 0
            n = 0
        result.append(now)
        now, n = (now, n + 1) if place[1] else (now + 1, 0)
    return [*result, now + (min(n, max(places[-1][1:])) if n else 0)]


def test_rotary_positions_count_pictures_by_their_longer_side(
    parts: ctypes.CDLL, cases: Cases
) -> None:
    """Re-bases keep distances, except for rows that would get below 0: these are packed."""
    for _, rng in cases(range(400)):
        tokens = random_text(rng)
        expected = rotary(tokens)
        n_tokens = len(expected) - 1
        n_cells = int(rng.integers(1, n_tokens + 1))
        cells = np.sort(rng.choice(n_tokens, n_cells, replace=False))
        backs = rng.integers(0, 1 + expected[-1] // 3, int(rng.integers(0, 4)))
        n_places = len({expected[cell] for cell in cells})
        back = int(backs.sum())
        if n_places > expected[-1] - back:
            continue
        places = np.empty(n_cells + 1, np.int32)
        lists = [int32s(values) for values in (tokens, cells, backs)]
        sizes = (len(tokens), n_cells, backs.size)
        pairs = [each for a, n in zip(lists, sizes, strict=True) for each in (pointer(a), n)]
        parts.place_rows(*pairs, pointer(places))
        assert places[-1] == expected[-1] - back
        behind: dict[int, int] = {}  # cells by their previous content
        for cell, place in zip(cells, places[:-1].tolist(), strict=True):
            at = expected[cell]
            assert behind.setdefault(at, place) == place >= max(0, at - back)
            if at - back >= len(behind) - 1:
                assert place == at - back
        assert sorted(set(behind.values())) == list(behind.values())
        is_same = expected[cells[-1]] == expected[-1]
        assert places[-2] <= places[-1] - (not is_same)


def reason_against(parts: ctypes.CDLL, text: str) -> str:
    """Return why a policy is refused, or ""."""
    result = ctypes.create_string_buffer(1000)
    parts.read_policy(text.encode(), result, 999)
    return result.value.decode()


def random_policy(kind: type[Policy], rng: np.random.Generator) -> Policy:
    """Return a policy with random parameters of all sizes within their limits."""
    values: dict[str, Any] = {}
    for item in fields(kind):
        if isinstance(item.default, int):
            least = int(item.metadata["limits"].least)
            values[item.name] = max(least, int(2.0 ** rng.uniform(0, 31)) - 1)
        else:
            value = float(10.0 ** rng.uniform(-20, 20)) * float(rng.choice([1, 1 / 3]))
            values[item.name] = float(f"{value:.{rng.integers(1, 18)}g}")
    return kind(**values)


def test_the_library_accepts_every_python_policy(parts: ctypes.CDLL, cases: Cases) -> None:
    for kind, rng in cases([*NATIVE_POLICIES] * 20):
        policy = random_policy(kind, rng).for_budget(100)
        assert POLICIES[policy.full_text.partition(":")[0]] is kind
        assert reason_against(parts, policy.full_text) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, "there is none") for text in ("", "h3o", "H2O", " h2o", "h2o,queries=3")),
        ("h2o:queries=3", "it has no parameter queries"),
        ("h2o-far:near=3,half_life=1,pool=1", "it has no parameter pool"),
        ("h2o-far", "near is missing"),
        ("h2o-far:near=3", "half_life is missing"),
        ("h2o-far:near=3,half_life", "half_life is no number"),
        ("h2o-far:near=3,half_life=1,near=1", "near is no number, or given twice"),
        *((f"h2o-far:half_life=9,near={n}", "near is") for n in ("", " 1", "1 ", "x", "0", "-1")),
        *((f"h2o-far:half_life=9,near={n}", "near is out of") for n in ("1.5", "2147483648")),
        *((f"streaming:sinks={n}", "sinks is") for n in ("-1", "2147483648")),
        *(
            (f"h2o-decay:half_life={x}", "half_life is")
            for x in ("0", "-1", "nan", "inf", "1e999", "", "1h", "1e", " 1", "0x1p3")
        ),
    ],
)
def test_invalid_policy_texts_are_refused(parts: ctypes.CDLL, text: str, reason: str) -> None:
    assert reason_against(parts, text).startswith(f"policy {text.partition(':')[0]}: {reason}")
