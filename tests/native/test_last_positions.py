"""Texts of two billion tokens continue as short ones do, up to the last position.

A modified state of a short text claims this position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checksums import checksum
from pyh2o import Llama
from pyh2o.cache.native import MAX_POSITIONS
from pyh2o.errors import ContextLimitError
from reference_rows import last_logits
from state_parts import N_LAYER, SIZES, RecallPart, State
from tiny_llama import tiny_llama

N_VOCAB, N_POS, PINNED = 384, 96, 4  # the number of sinks of `streaming`
N_READ, N_LEFT = 300, 600
RECALL, RECENT = 24, 12
N_PAGE = RecallPart.N_PAGE
MODEL: dict[str, Any] = {"seed": 4, "n_ctx_train": N_POS, **SIZES}


def llama_of(path: Path, policy: str, recall: int = 0) -> Llama:
    sizes: dict[str, Any] = {"recent": RECENT, "slack": 8, "n_ctx": 200}
    llm = tiny_llama(path, policy=policy, pinned=PINNED, hh=20 + recall, recall=recall, **sizes)
    llm.text.cache.pin(PINNED)
    return llm


def later_state(llm: Llama, by: int) -> bytes:
    """Return the state with all positions after the pinned rows increased by `n`."""
    has_archive = llm.kv.archived > 0
    state = State(
        bytes(llm.text.cache.state()), llm.kv.used, llm.kv.bytes_archive if has_archive else None
    )
    for name in ("shift", "pos_removable", "pos_forgotten"):
        state.head[name] += by
    for positions in (state.cell_positions, state.queries[0::2], *state.positions):
        positions[positions >= PINNED] += by
    if has_archive:
        move_archive(state.recall, by)
    return state.bytes()


def move_archive(recall: RecallPart, by: int) -> None:
    """Move the archive without its first page, which has the pinned rows."""
    assert by % N_PAGE == 0
    n_bytes = recall.page_size
    pages = bytearray(recall.pages[n_bytes:])
    text = np.uint64(1)
    recall.archive["first"] = N_PAGE
    for name, step in (("first", by), ("next", by), ("page", by // N_PAGE + 1)):
        recall.archive[name] += step
    recall.archive["text"] = text
    for at in range(0, len(pages), n_bytes):
        header = np.frombuffer(pages, recall.PAGE, 1, at)
        header["page"] += by // N_PAGE
        header["first"] += by
        header["text_before"] = text
        end = at + recall.PAGE.itemsize
        (text,) = np.frombuffer(checksum(bytes(pages[at:end])), "<u8")
    recall.pages = bytes(pages)


def load_far_state(llm: Llama, state: bytes, n_tokens: int, record: Path) -> None:
    """Load the state of a text of `n` tokens, recorded in a file without content."""
    llm.reset()
    llm.text.cache.load_state(state, len(range(n_tokens)))
    llm.text.record = np.memmap(record, np.intc, "w+", shape=(n_tokens + 2**12,))
    llm.n_tokens = n_tokens


@pytest.mark.parametrize("policy", ["h2o", "h2o-far", "snap:queries=4", "streaming"])
def test_a_text_continues_to_the_last_position(
    path: Path, tmp_path: Path, rng: np.random.Generator, policy: str
) -> None:
    """Its rows, scores and logits equal those of a short text bit for bit."""
    near, far = llama_of(path, policy), llama_of(path, policy)
    tokens: list[int] = rng.integers(0, N_VOCAB, N_READ + N_LEFT + near.n_batch).tolist()
    for llm in (near, far):
        llm.eval(tokens[:N_READ])
    assert near.kv.rebases > 0
    # batches end at the same offsets in both texts
    by = (MAX_POSITIONS - N_READ - N_LEFT) // near.n_batch * near.n_batch
    load_far_state(far, later_state(near, by), N_READ + by, tmp_path / "record")
    assert far.kv.position_limit == MAX_POSITIONS

    rest = tokens[N_READ : MAX_POSITIONS - by]
    for llm in (near, far):
        llm.eval(rest)
    assert far.n_tokens == MAX_POSITIONS
    assert far.kv.rebases == near.kv.rebases > 5
    np.testing.assert_array_equal(last_logits(far), last_logits(near))
    for layer in range(N_LAYER):
        (positions, scores), (later, other) = near.kv_rows(layer), far.kv_rows(layer)
        np.testing.assert_array_equal(np.where(positions < PINNED, 0, by) + positions, later)
        if policy != "streaming":  # its scores are positions
            np.testing.assert_array_equal(scores, other)


def test_rows_are_retrieved_up_to_the_last_position(
    path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    near, far = llama_of(path, "h2o", RECALL), llama_of(path, "h2o", RECALL)
    tokens: list[int] = rng.integers(0, N_VOCAB, N_READ + N_LEFT + N_PAGE).tolist()
    near.eval(tokens[:N_READ])
    by = (MAX_POSITIONS - N_READ - N_LEFT) // N_PAGE * N_PAGE
    states = later_state(near, 0), later_state(near, by)
    load_far_state(near, states[0], N_READ, tmp_path / "near")
    load_far_state(far, states[1], N_READ + by, tmp_path / "far")

    rest = tokens[N_READ : MAX_POSITIONS - by]
    for llm in (near, far):
        for start in range(0, len(rest), near.n_batch):
            llm.eval(rest[start : start + near.n_batch])
    assert far.n_tokens == MAX_POSITIONS
    assert far.kv.rebases == near.kv.rebases > 5
    assert far.kv.found_share == near.kv.found_share > 0
    np.testing.assert_array_equal(last_logits(far), last_logits(near))

    state = bytes(far.text.cache.state())
    load_far_state(far, state, MAX_POSITIONS, tmp_path / "again")
    assert bytes(far.text.cache.state()) == state


def test_a_token_after_the_last_position_is_refused(
    path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """The cache stays, and a tail can be removed and replaced."""
    llm = llama_of(path, "h2o-far")
    load_far_state(llm, state_of(llm, rng, MAX_POSITIONS), MAX_POSITIONS, tmp_path / "record")
    state = bytes(llm.text.cache.state())
    with pytest.raises(ContextLimitError, match="positions this model can use"):
        llm.eval([5])
    assert llm.n_tokens == MAX_POSITIONS
    assert bytes(llm.text.cache.state()) == state
    assert llm.text.remove_tail(MAX_POSITIONS - 3)
    llm.eval([5, 6, 7])
    with pytest.raises(ContextLimitError):
        llm.eval([8])


@pytest.mark.parametrize("n_tokens", [MAX_POSITIONS, 2**31 - 1])
def test_the_native_library_stops_at_the_last_position(
    path: Path,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    n_tokens: int,
) -> None:
    """For any caller; a state may claim more."""
    llm = llama_of(path, "h2o-far")
    load_far_state(llm, state_of(llm, rng, n_tokens), n_tokens, tmp_path / "record")
    monkeypatch.setattr(llm.text.cache, "check_positions", lambda _: None)
    state = bytes(llm.text.cache.state())
    with pytest.raises(RuntimeError):
        llm.eval([5])
    assert bytes(llm.text.cache.state()) == state


def state_of(llm: Llama, rng: np.random.Generator, n_tokens: int) -> bytes:
    """Return the state of a text of `n` tokens."""
    llm.eval(rng.integers(0, N_VOCAB, N_READ).tolist())
    return later_state(llm, n_tokens - N_READ)
