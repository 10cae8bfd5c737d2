"""Texts of two thousand million tokens: they go on as short ones do, to the last position there is.

Nobody reads so many: a state says that they have been, with the rows of a short text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyh2o import Llama
from pyh2o.cache.kv_cache import MOST_POSITIONS
from pyh2o.errors import ContextLimitError
from pyh2o.llama.states import read_kv_state
from reference_rows import last_logits
from state_parts import N_LAYER, SIZES, State
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

N_VOCAB, N_POS, PINNED = 384, 96, 4  # as many as `streaming` has sinks
N_READ, N_LEFT = 130, 600


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("far") / "tiny.gguf"
    return write_tiny_gguf(path, seed=4, n_ctx_train=N_POS, **SIZES)


def llama_of(path: Path, policy: str) -> Llama:
    sizes: dict[str, Any] = {"hh": 20, "recent": 12, "slack": 8, "n_ctx": 200}
    llm = tiny_llama(path, policy=policy, pinned=PINNED, **sizes)
    llm.pin(PINNED)
    return llm


def later_state(llm: Llama, by: int) -> bytes:
    """The state as if so many more tokens had come behind the pinned ones, before all others."""
    state = State(llm.kv_state(), llm.kv.used)
    for name in ("shift", "pos_removable", "pos_forgotten"):
        state.head[name] += by
    for positions in (state.cell_positions, state.queries[0::2], *state.positions):
        positions[positions >= PINNED] += by
    return state.bytes()


def go_far(llm: Llama, state: bytes, n_tokens: int, record: Path) -> None:
    """Load the state of a text of so many tokens, of which a file without content is the record."""
    llm.reset()
    read_kv_state(llm, state, range(n_tokens))
    llm.input_ids = np.memmap(record, np.intc, "w+", shape=(n_tokens + 2**12,))
    llm.n_tokens = n_tokens


@pytest.mark.parametrize("policy", ["h2o", "h2o-far", "snap:queries=4", "streaming"])
def test_a_text_goes_on_to_the_last_position(
    tiny: Path, tmp_path: Path, rng: np.random.Generator, policy: str
) -> None:
    """Its rows, scores and logits are those of a short text, bit for bit."""
    near, far = llama_of(tiny, policy), llama_of(tiny, policy)
    tokens: list[int] = rng.integers(0, N_VOCAB, N_READ + N_LEFT + near.n_batch).tolist()
    for llm in (near, far):
        llm.eval(tokens[:N_READ])
    assert near.kv.rebases > 0
    # batches end at the same places of both texts
    by = (MOST_POSITIONS - N_READ - N_LEFT) // near.n_batch * near.n_batch
    go_far(far, later_state(near, by), N_READ + by, tmp_path / "record")
    assert far.kv.position_limit == MOST_POSITIONS

    rest = tokens[N_READ : MOST_POSITIONS - by]
    for llm in (near, far):
        llm.eval(rest)
    assert far.n_tokens == MOST_POSITIONS
    assert far.kv.rebases == near.kv.rebases > 5
    np.testing.assert_array_equal(last_logits(far), last_logits(near))
    for layer in range(N_LAYER):
        (positions, scores), (later, other) = near.kv_rows(layer), far.kv_rows(layer)
        np.testing.assert_array_equal(np.where(positions < PINNED, 0, by) + positions, later)
        if policy != "streaming":  # its scores are positions
            np.testing.assert_array_equal(scores, other)


def test_there_is_no_position_behind_the_last(
    tiny: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """What is there stays, and may be set back and gone on with."""
    llm = llama_of(tiny, "h2o-far")
    go_far(llm, state_of(llm, rng, MOST_POSITIONS), MOST_POSITIONS, tmp_path / "record")
    state = llm.kv_state()
    with pytest.raises(ContextLimitError, match="positions this model can use"):
        llm.eval([5])
    assert llm.n_tokens == MOST_POSITIONS
    assert llm.kv_state() == state
    assert llm.remove_tail(MOST_POSITIONS - 3)
    llm.eval([5, 6, 7])
    with pytest.raises(ContextLimitError):
        llm.eval([8])


@pytest.mark.parametrize("n_tokens", [MOST_POSITIONS, 2**31 - 1])
def test_the_native_library_ends_there_too(
    tiny: Path,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    n_tokens: int,
) -> None:
    """Whoever calls it; a state may say more."""
    llm = llama_of(tiny, "h2o-far")
    go_far(llm, state_of(llm, rng, n_tokens), n_tokens, tmp_path / "record")
    monkeypatch.setattr(llm._cache, "check_positions", lambda _: None)
    state = llm.kv_state()
    with pytest.raises(RuntimeError):
        llm.eval([5])
    assert llm.kv_state() == state


def state_of(llm: Llama, rng: np.random.Generator, n_tokens: int) -> bytes:
    """The state of a text of so many tokens."""
    llm.eval(rng.integers(0, N_VOCAB, N_READ).tolist())
    return later_state(llm, n_tokens - N_READ)
