"""Damaged states are refused as a whole, and those that pass the checks do no harm."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checksums import checksum
from mutations import KINDS, Edit
from pyh2o import Llama
from pyh2o.errors import DecodeError, SettingsError, StateError
from reference_rows import last_logits
from state_parts import N_LAYER, SIZES, State
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

N_VOCAB, N_POS = 384, 96
HEAVY, RECENT, SLACK, PINNED = 20, 12, 8, 3
MODEL: dict[str, Any] = {"seed": 4, "n_ctx_train": N_POS, **SIZES}


llama_of = partial(tiny_llama, hh=HEAVY, recent=RECENT, slack=SLACK, pinned=PINNED, n_ctx=200)


def read_text(llm: Llama, rng: np.random.Generator, n: int) -> list[int]:
    tokens: list[int] = rng.integers(0, N_VOCAB, n).tolist()
    llm.eval(tokens)
    return tokens


def test_a_mutated_state_is_refused_or_loads_unchanged(
    path: Path, rng: np.random.Generator
) -> None:
    """Most bytes are rows; the critical numbers come first."""
    llm = llama_of(path, policy="snap:queries=4")
    llm.pin_spans([(30, 34)])
    llm.share_fairly([50])
    tokens = read_text(llm, rng, 130)
    state = llm.kv_state()
    for attempt in range(600):
        at = int(rng.integers(8, rng.choice([1500, len(state)])))
        edit = Edit(str(rng.choice(KINDS)), at, int(rng.integers(1, 9)), int(rng.integers(2**20)))
        damaged = edit.of(state, state[::-1])
        if damaged == state:
            continue
        try:
            llm.load_kv_state(damaged, tokens)
        except StateError:
            assert llm.n_tokens == llm.kv.used == 0, attempt
        else:  # four bytes of llama.cpp's header have no effect
            assert llm.kv_state() == state, edit
    llm.load_kv_state(state, tokens)
    assert llm.kv_state() == state


NOT_NUMBERS = b"\xff" * 3000  # read as f16, f32 or scales of blocks


@pytest.mark.parametrize(
    ("arch_variant", "settings"),
    [
        ("llama", {"attention": "ops", "flash_attn": False}),
        ("llama", {"type_k": 8, "type_v": 8}),
        *((variant, {}) for variant in ("llama", "sliding_window", "qwen3next", "jamba")),
    ],
)
def test_a_refused_state_leaves_no_nan_rows(
    tmp_path: Path, rng: np.random.Generator, arch_variant: str, settings: dict[str, Any]
) -> None:
    """They used to stay in empty cells of weight 0, which made all later results nan."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=4, n_layer=4, arch_variant=arch_variant)
    llm = llama_of(path, **settings)
    tokens = read_text(llm, rng, 5)
    expected = last_logits(llm)
    assert np.isfinite(expected).all()
    more = read_text(llm, rng, 25)
    # the last part: V of a layer, a window or a recurrent state
    damaged = llm.kv_state()[: -len(NOT_NUMBERS)] + NOT_NUMBERS
    with pytest.raises(StateError):
        llm.load_kv_state(damaged, tokens + more)
    assert llm.n_tokens == 0
    llm.eval(tokens)
    np.testing.assert_array_equal(last_logits(llm), expected)


def pins_and_spans(state: State) -> None:
    state.head["n_pinned"] = 10
    state.spans = np.array([20, 40], np.int32)


def moved_row(state: State) -> int:
    """Give a cell in use the row of another position, in the first head."""
    mine = state.positions[0][: State.N_CELLS][state.used]
    return int(np.flatnonzero(mine != state.cell_positions)[0])


def twice(lists: str) -> Callable[[State], None]:
    """Give two cells of a head the same row, or the same rotation."""

    def change(state: State) -> None:
        of_layer = getattr(state, lists)[0]
        of_layer[state.of_row(0, 0, 1)] = of_layer[state.of_row(0, 0, 0)]

    return change


def set_rotary(state: State, value: int) -> None:
    state.rotary[0][state.of_row(0, 0, 5)] = value


def set_head(name: str, value: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.head[name] = value

    return change


def own_cell(state: State) -> None:
    state.listed[moved_row(state)] = 0


def two_cells_of_a_position(state: State) -> None:
    state.cell_positions[1] = state.cell_positions[0]


def score_of(value: float) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.scores[0][1][int(state.used[3])] = value

    return change


def drop(*borders: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state.dropped = np.array(borders, np.int32)

    return change


CRAFTED: dict[str, Callable[[State], None]] = {
    "pins and spans together": pins_and_spans,
    "too many pins": set_head("n_pinned", PINNED + HEAVY + 1),
    "everything removable": set_head("pos_removable", 0),
    "too much removable": set_head("pos_removable", 60),
    "rows twice": twice("positions"),
    "rotations twice": twice("rotary"),
    "rotation below 0": lambda state: set_rotary(state, -1),
    "rotation beyond": lambda state: set_rotary(state, N_POS),
    "rotation of later rows": lambda state: set_rotary(state, N_POS - 1),
    "shift": set_head("shift", 1),
    "moved row in a separate cell": own_cell,
    "two cells of a position": two_cells_of_a_position,
    "dropped position far ahead": set_head("pos_forgotten", 2**31 - 1),
    "dropped tokens with rows": drop(125, 127),
    "dropped tokens ahead of the text": drop(3000, 3001),
    "overlapping dropped spans": drop(30, 35, 34, 36),
    "dropped pin": drop(0, 30),
    "no compactions": set_head("n_compactions", 0),
    "more compactions than cells": set_head("n_compactions", 10**6),
    "rows evicted": set_head("n_rows_evicted", 2**63),
    "rows moved": set_head("n_rows_moved", 2**62),
    "no re-bases": set_head("n_rebases", 0),
    "score below 0": score_of(-1.0),
    "infinite score": score_of(np.inf),
    "no score": score_of(np.nan),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_an_invalid_state_with_a_valid_checksum_is_refused(
    path: Path, rng: np.random.Generator, name: str
) -> None:
    llm = llama_of(path)
    tokens = read_text(llm, rng, 130)
    assert llm.kv.rebases > 0
    state = State(llm.kv_state(), llm.kv.used)
    assert state.bytes() == llm.kv_state()
    CRAFTED[name](state)
    with pytest.raises(StateError):
        llm.load_kv_state(state.bytes(), tokens)
    assert llm.n_tokens == llm.kv.used == 0
    read_text(llm, rng, 130)


@pytest.mark.parametrize("number", [0, 1], ids=["its position", "its rotation"])
def test_queries_at_wrong_positions_are_refused(
    path: Path, rng: np.random.Generator, number: int
) -> None:
    llm = llama_of(path, policy="snap:queries=3")
    tokens = read_text(llm, rng, 130)
    state = State(llm.kv_state(), llm.kv.used)
    assert state.bytes() == llm.kv_state()
    state.queries[number] += 1
    with pytest.raises(StateError):
        llm.load_kv_state(state.bytes(), tokens)


def test_random_states_with_valid_checksums_do_no_harm(
    path: Path, rng: np.random.Generator
) -> None:
    """Accepted states continue without a crash, with removed tails and many compactions."""
    llm = llama_of(path)
    tokens = read_text(llm, rng, 130)
    whole, n_used = llm.kv_state(), llm.kv.used
    refused = 0
    for _ in range(150):
        state = State(whole, n_used)
        for _ in range(int(rng.integers(1, 4))):
            scramble(state, rng)
        try:
            llm.load_kv_state(state.bytes(), tokens)
        except StateError:
            refused += 1
            continue
        llm.text.remove_tail(max(1, llm.n_tokens - int(rng.integers(0, 12))))
        with contextlib.suppress(DecodeError):  # a forged state may lack a newest position
            read_text(llm, rng, 60)
    assert 30 < refused < 150


def test_nan_rows_end_the_text(path: Path, rng: np.random.Generator) -> None:
    """They cannot be ranked; sorting by them would read past the array."""
    llm = llama_of(path, attention="ops", flash_attn=False)
    tokens = read_text(llm, rng, 130)
    state = State(llm.kv_state(), llm.kv.used)
    state.rows[1][:] = 0xFF
    llm.load_kv_state(state.bytes(), tokens)
    with pytest.raises(RuntimeError):
        read_text(llm, rng, 60)


def scramble(state: State, rng: np.random.Generator) -> None:
    numbers = [state.head.view("<i4"), state.cell_positions, state.used, state.listed]
    layer = int(rng.integers(N_LAYER))
    numbers += [state.positions[layer], state.rotary[layer], state.scores[layer][0].view("<i4")]
    array = numbers[int(rng.integers(len(numbers)))]
    i = int(rng.integers(len(array)))
    array[i] = int(rng.choice([0, 1, array[i] ^ 1, array[(i + 1) % len(array)], 100])) & 0x7F


def test_a_state_with_pins_lowered_for_spans_is_loaded(
    path: Path, rng: np.random.Generator
) -> None:
    """It used to be refused as damaged."""
    llm = llama_of(path, pinned=10)
    llm.text.cache.pin(2)
    llm.pin_spans([(20, 30)])
    tokens = read_text(llm, rng, 60)
    state = llm.kv_state()
    llm.load_kv_state(state, tokens)
    assert llm.kv.pinned == 2
    assert llm.kv_state() == state


def test_every_saved_state_is_loaded(path: Path, rng: np.random.Generator) -> None:
    """Random settings, pins, chunks and tails: saving a loaded state gives the same bytes."""
    for _ in range(12):
        pinned, heavy = int(rng.integers(0, 6)), int(rng.integers(1, 25))
        settings = {
            "policy": str(rng.choice(["h2o", "h2o-far:half_life=2", "roco", "snap:queries=5"])),
            "recent": int(rng.integers(1, 12)),
            "slack": int(rng.integers(1, 30)),
        }
        llm = llama_of(path, hh=heavy, pinned=pinned, **settings)
        llm.text.cache.pin(int(rng.integers(0, (pinned + heavy) // 2 + 1)))
        start = int(rng.integers(0, 60))
        llm.pin_spans([(start, start + int(rng.integers(1, (pinned + heavy) // 2 + 1)))])
        tokens: list[int] = []
        for _ in range(12):
            tokens += read_text(llm, rng, int(rng.choice([1, 2, 9, 40])))
            start = int(rng.integers(0, len(tokens)))
            with contextlib.suppress(SettingsError):  # pinned or newest
                llm.text.drop_spans([(start, start + int(rng.integers(1, 50)))])
            n_left = max(1, len(tokens) - int(rng.integers(0, 14)))
            if llm.text.remove_tail(n_left):
                del tokens[n_left:]
            state = llm.kv_state()
            llm.load_kv_state(state, tokens)
            assert llm.kv_state() == state, settings
        llm.close()


@pytest.mark.parametrize(
    ("arch_variant", "position", "other"),
    [
        ("sliding_window", 29, 65565),
        ("sliding_window", 20, 20 - 2**31),
        ("sliding_window", 20, 19),
        ("lfm2", 29, 65565),
        ("lfm2", 29, -5),
    ],
)
def test_parts_of_different_texts_are_refused(
    tmp_path: Path, rng: np.random.Generator, arch_variant: str, position: int, other: int
) -> None:
    """Change a position in a window or a recurrent state, which are the last parts of a state.

    The number of sequences and their ids follow the position.
    """
    behind = (1, 0) if arch_variant == "sliding_window" else (0,)
    found, forged = (struct.pack(f"<{1 + len(behind)}i", pos, *behind) for pos in (position, other))
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", seed=4, n_layer=4, n_ctx_train=N_POS, arch_variant=arch_variant
    )
    llm = llama_of(path)
    empty = llm.kv_state()
    tokens = read_text(llm, rng, 30)
    state = bytes(llm.text.cache.state())
    front, _, end = state[:-8].rpartition(found)
    data = front + forged + end
    assert front
    llm.reset()
    with pytest.raises(StateError):
        llm.text.cache.load_state(data + checksum(data[8:]), len(tokens))
    assert llm.kv_state() == empty
    llm.text.cache.load_state(state, len(tokens))
