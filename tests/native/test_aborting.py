"""Batches aborted at any node of the graph leave no trace."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breaking_off import Countdown, StopError
from pyh2o import Llama
from pyh2o._native import ffi, lib
from pyh2o.cache import aborting
from pyh2o.cache.native import context_of
from some_policies import EXAMPLES
from tiny_gguf import write_tiny_gguf
from tiny_llama import assert_same_cache, random_tokens, stored_as, tiny_llama

N_LAYER, N_VOCAB, N_POS = 6, 384, 128
HEAVY, RECENT, SLACK = 14, 9, 20
SETTINGS = {"hh": HEAVY, "recent": RECENT, "slack": SLACK, "n_ctx": 200, "logits_all": True}
POLICIES = ["h2o", "h2o-far", "snap", "roco", *EXAMPLES[:2]]
# The attention weights of queries reach their limit within one batch.
FADES_FAST = "h2o-far:near=2,half_life=0.25"

MakeLlama = Callable[..., Llama]
MODEL = {"seed": 6, "n_layer": N_LAYER, "head_size": 64, "n_ctx_train": N_POS}


@pytest.fixture(autouse=True)
def _asked_at_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborting, "INTERVAL", 0)


def nodes_of_a_batch(llm: Llama, tokens: list[int]) -> int:
    """Return how often a batch of `n` tokens calls the callback; the batch stays in the text."""
    never = Countdown(0)
    llm.text.while_reading = never
    llm.eval(tokens)
    llm.text.while_reading = None
    return -never.n_left


def abort_batch(llm: Llama, tokens: list[int], node: int) -> None:
    llm.text.while_reading = Countdown(node)
    with pytest.raises(StopError):
        llm.eval(tokens)
    llm.text.while_reading = None


def assert_no_trace(
    make: MakeLlama, rng: np.random.Generator, *, n_first: int, n_nodes: int
) -> None:
    """Abort one batch at its first and at other nodes, and compare with an uninterrupted twin."""
    alone, other = make(), make()
    first, more = random_tokens(rng, n_first), random_tokens(rng, 90)
    for llm in (alone, other):
        llm.eval(first)
    before, n_compactions = other.kv_state(), other.kv.compactions
    rows = set()
    for node in (1, int(rng.integers(2, n_nodes)), int(rng.integers(2, n_nodes)), n_nodes):
        abort_batch(other, more, node)
        assert other.n_tokens == n_first
        rows.add(
            b"".join(array.tobytes() for layer in range(N_LAYER) for array in other.kv_rows(layer))
        )
    # a compaction that made space for the batch stays; no compaction follows
    assert len(rows) == 1
    if other.kv.compactions == 0:  # later free cells lie between the others, whose rows differ
        assert other.kv_state() == before
    assert other.kv.compactions - n_compactions == (other.text.room_in_batch() == SLACK)
    for llm in (alone, other):
        llm.eval(more)
    np.testing.assert_array_equal(alone.scores[: alone.n_tokens], other.scores[: alone.n_tokens])
    assert_same_cache(alone, other)
    assert other.kv.compactions == alone.kv.compactions
    alone.close()
    other.close()


# every path through the graph, and tokens that are not archived and retrieve the same rows later
WAYS = [
    *({"policy": policy} for policy in (*POLICIES, FADES_FAST)),
    stored_as("q8_0"),
    {"attention": "ops", "flash_attn": False},
    {"flash_attn": True},
    *({"hh": HEAVY + 12, "recall": 12, "attention": each} for each in ("ops", "auto")),
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_an_aborted_batch_leaves_no_trace(
    path: Path, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """Without a compaction, before a compaction and before a re-base."""

    def make() -> Llama:
        return tiny_llama(path, **{**SETTINGS, "policy": "h2o-far", **settings})

    n_nodes = nodes_of_a_batch(make(), random_tokens(rng, 16))
    assert n_nodes > 5 * N_LAYER
    capacity = make().kv.capacity
    for n_first in (int(rng.integers(1, 12)), capacity, 90, N_POS + 2):
        assert_no_trace(make, rng, n_first=n_first, n_nodes=n_nodes)


def test_an_aborted_first_batch_keeps_the_pins(path: Path, rng: np.random.Generator) -> None:
    alone, other = (tiny_llama(path, **SETTINGS) for _ in range(2))
    tokens = random_tokens(rng, 100)
    for llm in (alone, other):
        llm.text.cache.pin(4)
        llm.pin_spans([(20, 24)])
    abort_batch(other, tokens, 40)
    assert (other.n_tokens, other.kv.used, other.kv.pinned) == (0, 0, 4)
    for llm in (alone, other):
        llm.eval(tokens)
    assert_same_cache(alone, other)


def test_aborting_leaves_no_trace_in_a_full_cache(path: Path, rng: np.random.Generator) -> None:
    alone, other = (tiny_llama(path, evict=False, n_ctx=256, logits_all=True) for _ in range(2))
    first, more = random_tokens(rng, 40), random_tokens(rng, 50)
    for llm in (alone, other):
        llm.eval(first)
    before = other.kv_state()
    abort_batch(other, more, 33)
    assert other.kv_state() == before
    for llm in (alone, other):
        llm.eval(more)
    np.testing.assert_array_equal(alone.scores[: alone.n_tokens], other.scores[: alone.n_tokens])


def test_aborting_an_exact_prefill_leaves_no_trace(path: Path, rng: np.random.Generator) -> None:
    """The larger cache and its rows are discarded."""
    alone, other = (tiny_llama(path, prefill="exact", n_batch=20, **SETTINGS) for _ in range(2))
    tokens = random_tokens(rng, 100)
    n_nodes = nodes_of_a_batch(tiny_llama(path, **SETTINGS), tokens[:20])
    alone.eval(tokens[:40])
    abort_batch(other, tokens, 2 * n_nodes + 50)
    assert_same_cache(alone, other)


@pytest.mark.parametrize("variant", ["gemma2", "gpt_oss"])
def test_aborting_leaves_no_trace_in_a_windowed_cache(
    tmp_path: Path, rng: np.random.Generator, variant: str
) -> None:
    """Up to rounding: llama.cpp puts the rows of a window into other cells."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=6, arch_variant=variant, n_layer=4)
    alone, other = (tiny_llama(path, **SETTINGS) for _ in range(2))
    first, more = random_tokens(rng, 150), random_tokens(rng, 60)
    for llm in (alone, other):
        llm.eval(first)
    abort_batch(other, more, 50)
    assert other.n_tokens == len(first)
    for llm in (alone, other):
        llm.eval(more)
    np.testing.assert_allclose(
        alone.scores[: alone.n_tokens], other.scores[: alone.n_tokens], rtol=1e-3, atol=1e-3
    )


def test_batches_with_recurrent_states_are_not_aborted(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Recurrent states are overwritten while the graph is computed."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=6, arch_variant="lfm2", n_layer=4)
    llm = tiny_llama(path, **SETTINGS)
    assert nodes_of_a_batch(llm, random_tokens(rng, 50)) == 0
    assert llm.n_tokens == 50


def test_small_batches_do_not_call_the_abort_callback(path: Path, rng: np.random.Generator) -> None:
    llm = tiny_llama(path, **SETTINGS)
    for token in random_tokens(rng, 30):
        assert nodes_of_a_batch(llm, [token]) == 0


def test_sampling_from_discarded_logits_is_refused(path: Path, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 10)
    sampled = []
    for breaks in (False, True):
        llm = tiny_llama(path, **SETTINGS)
        llm.eval(tokens)
        if breaks:
            abort_batch(llm, random_tokens(rng, 15), 100)
        sampled.append(next(llm.generate(tokens, temp=0)))
    assert sampled[0] == sampled[1]


def test_errors_of_llama_cpp_are_kept(path: Path, rng: np.random.Generator) -> None:
    llm = tiny_llama(path, **SETTINGS)
    with pytest.raises(RuntimeError, match="llama_decode returned"):
        llm.eval([N_VOCAB + 1] * 10)


def test_a_signal_handler_runs_during_a_batch(path: Path, rng: np.random.Generator) -> None:
    """It runs between two nodes. If it raises nothing, the batch continues."""
    llm = tiny_llama(path, **SETTINGS)
    handled: list[int] = []
    asked: list[int] = []

    def press() -> None:
        asked.append(len(handled))
        if len(asked) == 20:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: handled.append(len(asked)))
    try:
        llm.text.while_reading = press
        llm.eval(random_tokens(rng, 15))
    finally:
        signal.signal(signal.SIGINT, before)
    assert handled == [20]
    assert asked[19:21] == [0, 1]
    assert llm.n_tokens == 15


READS_UNTIL_CTRL_C = """
import sys, time
from pyh2o import Llama
from pyh2o.cache import aborting

aborting.INTERVAL = 0
llm = Llama(sys.argv[1], hh=14, recent=9, slack=20, n_ctx=200, n_threads=1, n_threads_batch=1)
asked = []

def in_the_fifth_batch():
    asked.append(llm.n_tokens)
    if len(set(asked)) == 5:
        print("reading", flush=True)
        time.sleep(600)

llm.text.while_reading = in_the_fifth_batch
try:
    llm.eval(list(range(3, 303)))
except KeyboardInterrupt:
    llm.text.while_reading = None
    n_read = llm.n_tokens
    assert llm.input_ids[:n_read].tolist() == list(range(3, 3 + n_read))
    llm.eval(list(range(3 + n_read, 303)))
    print(asked[-1], n_read, llm.n_tokens, llm.kv.used <= 43)
"""


def test_ctrl_c_aborts_a_long_prefill(path: Path) -> None:
    """The signal comes from another process in the middle of a batch."""
    program = subprocess.Popen(
        [sys.executable, "-c", READS_UNTIL_CTRL_C, str(path)],
        stdout=subprocess.PIPE,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == b"reading\n"
        program.send_signal(signal.SIGINT)
        output, _ = program.communicate(timeout=300)
    finally:
        program.kill()
    assert program.returncode == 0
    during, n_read, n_all, fits = output.split()
    assert int(during) == int(n_read) > 0
    assert (int(n_all), fits) == (300, b"True")


@pytest.mark.parametrize("ends_larger", [False, True])
def test_the_abort_callback_moves_with_the_context(
    path: Path, rng: np.random.Generator, ends_larger: bool
) -> None:
    """The callback is set before or after the cache is temporarily enlarged."""
    llm = tiny_llama(path, **SETTINGS)
    llm.eval(random_tokens(rng, 30))
    context = context_of(llm.text.model.address)
    question = ffi.new_handle(aborting._AbortCheck(Countdown(0)))
    breaker = ffi.new("struct llama_h2o_breaker *", [lib.pyh2o_ask, question, 10**12, 0])
    if ends_larger:
        lib.llama_h2o_set_breaker(context, breaker)
    llm.text.cache.enlarge(300)
    lib.llama_h2o_set_breaker(context, ffi.NULL if ends_larger else breaker)
    llm.text.cache.shrink()
    breaker.next_us = 0
    llm.eval([5])
    assert (breaker.next_us == 0) == ends_larger
    lib.llama_h2o_set_breaker(context, ffi.NULL)
