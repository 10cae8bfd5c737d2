"""Valid data with damage: bytes flipped, cut and moved, and JSON with odd values."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

KINDS = ("flip", "cut", "end", "repeat", "zero", "splice", "number")
# Numbers in headers are counts and offsets, so values at the limits matter most.
NUMBERS = (0, 1, 2, 3, 7, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
BORDER = 400


@dataclass(frozen=True)
class Edit:
    """A change of `length` bytes from `at` on, from the end if that is negative.

    `value` is the bit to flip, the offset of a splice's source, or the number to write.
    """

    kind: str
    at: int
    length: int
    value: int

    def of(self, data: bytes, other: bytes) -> bytes:
        """Return the data with the change; a splice copies from the other data."""
        if not data:
            return data
        start = self.at % len(data)
        before, rest = data[:start], data[start:]
        length = min(self.length, len(rest))
        if self.kind == "flip":
            return before + bytes([rest[0] ^ (1 << self.value % 8)]) + rest[1:]
        if self.kind == "cut":
            return before + rest[length:]
        if self.kind == "end":
            return before
        if self.kind == "repeat":
            return before + rest[:length] + rest
        if self.kind == "zero":
            return before + bytes(length) + rest[length:]
        if self.kind == "splice":
            source = start if self.value % 2 else self.value % max(1, len(other))
            return before + other[source : source + length] + rest[length:]
        width = (1, 2, 4, 8)[self.length % 4]
        number = NUMBERS[self.value % len(NUMBERS)] % (1 << 8 * width)
        return before + number.to_bytes(width, "little") + rest[width:]


def edits(n_bytes: int) -> st.SearchStrategy[list[Edit]]:
    """Return changes of data of this size; most are short and at the ends, where the tables are."""
    at = st.one_of(st.integers(0, BORDER), st.integers(-BORDER, -1), st.integers(0, n_bytes))
    length = st.one_of(st.integers(1, 64), st.integers(1, n_bytes))
    edit = st.builds(Edit, st.sampled_from(KINDS), at, length, st.integers(0, 2**20))
    return st.lists(edit, min_size=1, max_size=3)


def edited(data: bytes, changes: list[Edit], other: bytes = b"") -> bytes:
    """Return the data with all changes."""
    for change in changes:
        data = change.of(data, other)
    return data


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 5, 40, 0.5, -0.0, 1e308, -1e308, 2**31 - 1, 2**31, 2**63,
    10**30, float("nan"), float("inf"), "", "a", "5", "\0", "a\nb", "é☺", "\ud800", "x" * 300, [],
    {}, [[]], [None], [0, 1], [[0, 5]], [[5, 0]], [-1], {"a": 1}, {"": None},
]  # fmt: skip


@dataclass(frozen=True)
class Oddity:
    """A change of a JSON value: "set", "delete", "add", "double" or "nudge" (a number, by one).

    `way` is the path to it: an index at each step, modulo the number of values there.
    """

    way: tuple[int, ...]
    action: str
    value: Any
    key: str

    def make(self, data: Any) -> None:
        """Change the data in place."""
        here = data
        for step in self.way[:-1]:
            below = list(here.values() if isinstance(here, dict) else here)
            below = [each for each in below if isinstance(each, (dict, list)) and each]
            if not below:
                break
            here = below[step % len(below)]
        if not here:
            return
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = keys[self.way[-1] % len(keys)]
        if self.action == "delete":
            del here[key]
        elif self.action == "add" and isinstance(here, dict):
            here[self.key] = copy.deepcopy(self.value)
        elif self.action == "double" and isinstance(here, list):
            here.append(copy.deepcopy(here[key]))
        elif self.action == "nudge" and type(here[key]) in (int, float):
            here[key] += 1 if self.value else -1
        else:
            here[key] = copy.deepcopy(self.value)


def oddities(
    values: st.SearchStrategy[Any] | None = None, keys: tuple[str, ...] = ("x", "a\nb")
) -> st.SearchStrategy[list[Oddity]]:
    """Return changes of a JSON value."""
    oddity = st.builds(
        Oddity,
        st.lists(st.integers(0, 30), min_size=1, max_size=4).map(tuple),
        st.sampled_from(["set", "set", "delete", "add", "double", "nudge"]),
        st.sampled_from(ODD) if values is None else values,
        st.sampled_from(keys),
    )
    return st.lists(oddity, min_size=1, max_size=3)


def made_odd(data: Any, changes: list[Oddity]) -> Any:
    """Return a copy of the data with all changes."""
    data = copy.deepcopy(data)
    for change in changes:
        change.make(data)
    return data


def json_bytes(data: Any) -> bytes:
    """Encode as a careless program does: with NaN and lone surrogates."""
    return json.dumps(data).encode()
