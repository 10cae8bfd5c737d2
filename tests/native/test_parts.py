"""Parts of the native library that know nothing of tensors, on their own."""

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

CACHE_PARTS = ["plan", "row-positions", "query-ring"]


@pytest.fixture(scope="module")
def parts() -> ctypes.CDLL:
    sources = [
        Path(__file__).parent / "parts" / "parts.cpp",
        *(NATIVE / "src" / "cache" / f"h2o-{name}.cpp" for name in CACHE_PARTS),
        *(NATIVE / "src" / "policies").glob("*.cpp"),
    ]
    return compile_library("parts", sources)


# ---- the choice ----


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
    """The indices of the rows that stay."""
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


def test_a_plan_is_made_only_where_every_row_has_a_place(parts: ctypes.CDLL, cases: Cases) -> None:
    """More rows that must stay than may would be moved past the end of the lists."""
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


# ---- whose row lies where ----


class RowPositions:
    """A native object beside a plain model of it, which every step is checked against."""

    def __init__(self, parts: ctypes.CDLL, n_heads: int, n_cells: int) -> None:
        parts.positions_new.restype = ctypes.c_void_p
        self.parts, self.n_heads, self.n_cells = parts, n_heads, n_cells
        self.native = ctypes.c_void_p(parts.positions_new(n_heads, n_cells))
        self.shift = 0
        # of cells with rows of several positions: [n_heads] of (position, rotary position)
        self.listed: dict[int, list[tuple[int, int]]] = {}

    def reset(self) -> None:
        self.parts.positions_reset(self.native)
        self.shift, self.listed = 0, {}

    def list_cells(self, cells: dict[int, int]) -> None:
        numbers, positions = int32s(cells), int32s(cells.values())
        self.parts.positions_list(self.native, pointer(numbers), pointer(positions), len(cells))
        for cell, position in cells.items():
            rows = [(position, position - self.shift)] * self.n_heads
            self.listed.setdefault(cell, rows)

    def unlist(self, cell: int) -> None:
        self.parts.positions_unlist(self.native, cell)
        self.listed.pop(cell, None)

    def move(self, head: int, moves: list[tuple[int, int]]) -> None:
        self.parts.positions_move(self.native, head, pointer(int32s(moves)), len(moves))
        for source, target in moves:
            rows = list(self.listed[target])
            rows[head] = self.listed[source][head]
            self.listed[target] = rows

    def turn_back(self, cells: list[int], back: int, following: int = 2**31 - 1) -> None:
        by = np.zeros((self.n_heads, self.n_cells), dtype=np.int32)
        numbers, shape = int32s(cells), (self.n_heads, self.n_cells)
        self.parts.positions_turn_back(
            self.native, *shape, pointer(numbers), len(cells), back, following, pointer(by)
        )
        before = {cell: self.listed[cell] for cell in cells}
        for cell in cells:
            self.listed[cell] = list(before[cell])
        for head in range(self.n_heads):
            in_text_order = sorted(cells, key=lambda cell: before[cell][head])
            for place, cell in enumerate(in_text_order):
                position, rotary = before[cell][head]
                turned = max(place, rotary - back)
                self.listed[cell][head] = (position, turned)
                assert by[head, cell] == turned - rotary
        self.shift += back

    def taken(self, cells: list[int]) -> RowPositions:
        other = RowPositions(self.parts, self.n_heads, len(cells) + 3)
        other.list_cells({len(cells) + 1: 7})
        self.parts.positions_take(other.native, self.native, pointer(int32s(cells)), len(cells))
        other.listed = {i: list(self.listed[cell]) for i, cell in enumerate(cells)}
        other.shift = self.shift
        return other

    def copied(self) -> RowPositions:
        other = RowPositions(self.parts, self.n_heads, self.n_cells)
        self.parts.positions_copy_lists(other.native, self.native, self.n_heads, self.n_cells)
        other.listed, other.shift = dict(self.listed), self.shift
        return other

    def check(self) -> None:
        assert self.parts.positions_next_rope_pos(self.native, 1000) == 1000 - self.shift
        for cell in range(self.n_cells):
            for head in range(self.n_heads):
                # a cell that is not listed has rows of its own position
                position, rotary = self.listed.get(cell, [(77, -1)] * self.n_heads)[head]
                assert self.parts.positions_pos(self.native, head, cell, 77) == position
                assert self.parts.positions_rope_pos(self.native, head, cell) == rotary

    def close(self) -> None:
        self.parts.positions_delete(self.native)


def test_rows_are_found_where_they_lie(parts: ctypes.CDLL, cases: Cases) -> None:
    """Cells fill up, compactions move rows and free cells, re-bases turn them, tails go."""
    for _, rng in cases(range(60)):
        rows = RowPositions(parts, n_heads=int(rng.integers(1, 5)), n_cells=12)
        own: dict[int, int] = {}  # positions of the cells in use
        position = 0
        for _ in range(40):
            step = rng.integers(6)
            free = [cell for cell in range(12) if cell not in own]
            if step < 2 and free:
                for cell in free[: int(rng.integers(1, 4))]:
                    own[cell], position = position, position + 1
            elif step == 2 and len(own) > 3:
                rows.list_cells(own)
                freed, *kept = rng.permutation(sorted(own))[: int(rng.integers(2, 4))].tolist()
                for head in range(rows.n_heads):
                    rows.move(head, [(freed, int(rng.choice(kept)))])
                rows.unlist(freed)
                del own[freed]
            elif step == 3 and own:
                rows.list_cells(own)
                most = position - rows.shift - len(own)  # the next token comes behind them
                rows.turn_back(list(own), int(rng.integers(0, most + 1)))
            elif step == 4 and own:
                rows.list_cells(own)
                for other in (rows.taken(list(own)), rows.copied()):
                    other.check()
                    other.close()
            elif step == 5 and rng.integers(5) == 0:
                rows.reset()
                own, position = {}, 0
            rows.check()
        rows.close()


def test_turned_rows_keep_their_order_and_their_distances(parts: ctypes.CDLL) -> None:
    rows = RowPositions(parts, n_heads=1, n_cells=5)
    cells = {3: 2, 0: 40, 1: 41, 4: 60}
    rows.list_cells(cells)
    rows.turn_back(list(cells), 39)
    # 2 - 39 is below 0 and packed at the start; 40 - 39 comes right behind it
    rotary = {cell: parts.positions_rope_pos(rows.native, 0, cell) for cell in cells}
    assert rotary == {3: 0, 0: 1, 1: 2, 4: 21}
    assert parts.positions_next_rope_pos(rows.native, 61) == 22
    rows.close()


def test_rows_that_come_back_push_the_others_aside(parts: ctypes.CDLL) -> None:
    rows = RowPositions(parts, n_heads=1, n_cells=5)
    cells = {3: 10, 0: 20, 1: 30, 4: 40}
    rows.list_cells(cells)
    rows.turn_back(list(cells), 37)
    assert [parts.positions_rope_pos(rows.native, 0, cell) for cell in cells] == [0, 1, 2, 3]
    parts.positions_replace(rows.native, 0, 3, 25)
    by = np.zeros((1, 5), dtype=np.int32)
    numbers = int32s(list(cells))
    parts.positions_turn_back(rows.native, 1, 5, pointer(numbers), 4, 0, 4, pointer(by))
    assert [parts.positions_rope_pos(rows.native, 0, cell) for cell in (0, 3, 1, 4)] == [0, 1, 2, 3]
    assert by.tolist() == [[-1, 0, 0, 1, 0]]
    rows.close()


def test_a_ring_knows_the_last_queries(parts: ctypes.CDLL, cases: Cases) -> None:
    parts.ring_new.restype = ctypes.c_void_p
    for _, rng in cases(range(60)):
        n_slots = int(rng.integers(0, 6))
        ring = ctypes.c_void_p(parts.ring_new(n_slots))
        queries: dict[int, int] = {}  # rotary position by position
        position, shift = 0, 0
        for _ in range(30):
            step = rng.integers(4)
            if step < 2:
                n = int(rng.integers(1, 10))
                parts.ring_note(ring, position, position + n - 1, shift)
                queries |= {p: p - shift for p in range(position, position + n)}
                position += n
                # older ones lie where these do now
                queries = {p: r for p, r in queries.items() if p >= position - n_slots}
            elif step == 2:
                position = int(rng.integers(max(0, position - 4), position + 1))
                parts.ring_forget(ring, position)
                queries = {p: r for p, r in queries.items() if p < position}
            else:
                back = int(rng.integers(0, 20))
                turned = np.zeros(n_slots, dtype=np.uint8)
                parts.ring_turn_back(ring, back, pointer(turned))
                assert np.flatnonzero(turned).tolist() == sorted(p % n_slots for p in queries)
                queries = {p: r - back for p, r in queries.items()}
                shift += back
            slots = np.zeros((n_slots, 2), dtype=np.int32)
            parts.ring_slots(ring, pointer(slots))
            assert {int(p): int(r) for p, r in slots if p >= 0} == queries
            assert all(p % n_slots == i for i, (p, _) in enumerate(slots) if p >= 0)
        parts.ring_delete(ring)


# ---- policies as text ----


def reason_against(parts: ctypes.CDLL, text: str) -> str:
    """Why there is no such policy; "" if there is one."""
    result = ctypes.create_string_buffer(1000)
    parts.read_policy(text.encode(), result, 999)
    return result.value.decode()


def random_policy(kind: type[Policy], rng: np.random.Generator) -> Policy:
    """With random parameters of all sizes, within their limits."""
    values: dict[str, Any] = {}
    for item in fields(kind):
        if isinstance(item.default, int):
            least = int(item.metadata["least"])
            values[item.name] = max(least, int(2.0 ** rng.uniform(0, 31)) - 1)
        else:
            value = float(10.0 ** rng.uniform(-20, 20)) * float(rng.choice([1, 1 / 3]))
            values[item.name] = float(f"{value:.{rng.integers(1, 18)}g}")
    return kind(**values)


def test_every_policy_of_python_is_there(parts: ctypes.CDLL, cases: Cases) -> None:
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
def test_texts_without_a_policy_are_refused(parts: ctypes.CDLL, text: str, reason: str) -> None:
    assert reason_against(parts, text).startswith(f"policy {text.partition(':')[0]}: {reason}")
