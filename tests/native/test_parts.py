"""Parts of the native library that know nothing of tensors, on their own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compiled import NATIVE, compile_library, int32s, pointer, sizes_of
from pyh2o.policies import POLICIES, Policy, parse_policy
from pyh2o.reference import select
from random_cases import Cases


@pytest.fixture(scope="module")
def parts() -> ctypes.CDLL:
    sources = [
        Path(__file__).parent / "parts" / "parts.cpp",
        NATIVE / "src" / "cache" / "h2o-plan.cpp",
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


# ---- policies as text ----


def native_policy(parts: ctypes.CDLL, text: str) -> tuple[bool, str]:
    """Whether there is such a policy; its text, or why there is none."""
    result = ctypes.create_string_buffer(1000)
    made = parts.read_policy(text.encode(), result, 999)
    return bool(made), result.value.decode()


def random_policy(kind: type[Policy], rng: np.random.Generator) -> Policy:
    """With random parameters of all sizes, within their limits."""
    values: dict[str, Any] = {}
    for item in fields(kind):
        assert item.default is not MISSING
        least, most = item.metadata["least"], item.metadata["most"]
        if isinstance(item.default, bool):
            values[item.name] = bool(rng.integers(2))
        elif isinstance(item.default, int):
            value = int(2.0 ** rng.uniform(0, 31)) - 1
            values[item.name] = max(int(least), value | 1 if item.metadata["odd"] else value)
        else:
            value = float(10.0 ** rng.uniform(-20, 20)) * float(rng.choice([1, 1 / 3]))
            value = float(f"{value:.{rng.integers(1, 18)}g}")
            values[item.name] = min(value, 1 / value) if most == 1 else value
    return kind(**values)


def test_every_policy_of_python_is_there(parts: ctypes.CDLL) -> None:
    for name, kind in POLICIES.items():
        text = kind().for_budget(100).full_text
        assert text.partition(":")[0] == name
        assert native_policy(parts, text) == (True, text)


def test_texts_of_all_numbers_are_pythons(parts: ctypes.CDLL, cases: Cases) -> None:
    for kind, rng in cases([*POLICIES.values()] * 40):
        policy = random_policy(kind, rng).for_budget(100)
        assert parse_policy(policy.full_text) == policy
        assert native_policy(parts, policy.full_text) == (True, policy.full_text)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("h2o-far:half_life=3.840e2,near=064", "h2o-far:near=64,half_life=384"),
        ("nacl:seed=18446744073709551615,random=1,queries=1", None),
        ("expected:covariance=true,queries=9,epsilon=.00001,horizon=2", None),
        ("expected:covariance=false,queries=9,epsilon=0.0,horizon=2", None),
        ("h2o-decay:half_life=10000000000000000", "h2o-decay:half_life=1e+16"),
        ("h2o-decay:half_life=1000000000000000", "h2o-decay:half_life=1000000000000000"),
        ("h2o-decay:half_life=0.1", "h2o-decay:half_life=0.1"),
    ],
)
def test_every_spelling_of_a_policy_gives_one_text(
    parts: ctypes.CDLL, given: str, text: str | None
) -> None:
    assert native_policy(parts, given) == (True, text or parse_policy(given).full_text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no policy "),
        ("h3o", "there is no policy h3o"),
        ("H2O", "there is no policy H2O"),
        (" h2o", "there is no policy  h2o"),
        ("h2o:", "policy h2o: '' gives no parameter a value"),
        ("h2o:queries=3", "policy h2o: it has no parameter queries"),
        ("h2o,queries=3", "there is no policy h2o,queries=3"),
        ("snap", "policy snap: queries is missing"),
        ("snap:queries=3", "policy snap: pool is missing"),
        ("snap:queries=3,pool", "policy snap: 'pool' gives no parameter a value"),
        ("snap:queries=3,pool=1,", "policy snap: '' gives no parameter a value"),
        ("snap:queries=3,pool=1,pool=1", "policy snap: pool is given twice"),
        ("snap:queries=3,pool=1,near=1", "policy snap: it has no parameter near"),
    ],
)
def test_ill_formed_texts_are_refused(parts: ctypes.CDLL, text: str, reason: str) -> None:
    assert native_policy(parts, text) == (False, reason)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("snap:pool=1,queries", ["0", "-1", "+1", "2147483648", "99999999999999999999", "1.0"]),
        ("snap:pool=1,queries", ["", " 1", "1 ", "1e3", "0x10", "three"]),
        ("snap:queries=3,pool", ["0", "2", "-1"]),
        ("streaming:sinks", ["-1", "2147483648"]),
        ("nacl:queries=3,random=0.5,seed", ["-1", "18446744073709551616", ""]),
        ("nacl:queries=3,seed=1,random", ["-0.1", "1.1", "nan", ""]),
        ("roco:guard", ["-0.001", "1.001", "inf", "0,5"]),
        ("h2o-decay:half_life", ["0", "-1", "nan", "inf", "1e999", "", "1h", "1e", " 1", "0x1p3"]),
        ("h2o-far:near=4,half_life", ["0", "-1", "nan", "infinity"]),
        ("h2o-far:half_life=9,near", ["0", "-1"]),
        ("expected:queries=9,horizon=2,covariance=true,epsilon", ["-1e-9", "nan"]),
        ("expected:queries=9,horizon=2,epsilon=0,covariance", ["True", "1", "yes", ""]),
        ("expected:queries=9,epsilon=0,covariance=true,horizon", ["0", "-1"]),
    ],
)
def test_values_out_of_their_limits_are_refused(
    parts: ctypes.CDLL, name: str, values: list[str]
) -> None:
    parameter = name.rpartition(",")[2].rpartition(":")[2]
    for value in values:
        made, reason = native_policy(parts, f"{name}={value}")
        assert not made, value
        if "," not in value:
            wanted = f"policy {name.partition(':')[0]}: {parameter} has a value"
            assert reason == f"{wanted} that is out of its limits"
