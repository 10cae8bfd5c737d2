"""The number of threads that compute a graph adapts to load, and no result depends on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compiled import compile_library, ggml_header, pointer, sizes_of
from pyh2o import Llama
from pyh2o.library import LIBRARY_FOLDER
from reference_rows import last_logits
from tiny_gguf import write_tiny_gguf
from tiny_llama import assert_same_cache, random_tokens, stored_as, tiny_llama

FloatArray = npt.NDArray[np.float32]

KERNELS = ("portable", "neon", "avx2", "avx512", "avx512bf16")
STEP = 0.02  # seconds of a graph


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    source = Path(__file__).parent / "parts" / "threads.cpp"
    libraries = LIBRARY_FOLDER.glob("libllama.*")
    library = compile_library("threads", [source], [ggml_header()], libraries)
    library.new_threads.restype = ctypes.c_void_p
    return library


class Machine:
    """Cores that threads share fairly with other programs, each of which uses a whole core."""

    def __init__(self, library: ctypes.CDLL, n_cores: int) -> None:
        self.library, self.n_cores = library, n_cores
        self.threads = ctypes.c_void_p(library.new_threads())
        self.now = 0.0

    def run(self, seconds: float, *, asked: int, others: int, step: float = STEP) -> list[int]:
        """Return how many threads computed each graph."""
        counts = []
        for _ in range(round(seconds / step)):
            n = self.library.choose(self.threads, asked, ctypes.c_double(self.now))
            self.now += step
            used = step * n * min(1.0, self.n_cores / (n + others))
            seen = [ctypes.c_double(number) for number in (step, used, self.now)]
            self.library.add(self.threads, n, *seen)
            counts.append(n)
        return counts


@pytest.fixture
def machine(library: ctypes.CDLL) -> Iterator[Machine]:
    machine = Machine(library, 2)
    yield machine
    library.delete_threads(machine.threads)


def test_all_threads_compute_on_an_idle_machine(machine: Machine) -> None:
    assert set(machine.run(10, asked=2, others=0)) == {2}


def test_a_thread_without_a_free_core_is_left_out(machine: Machine) -> None:
    machine.run(1, asked=2, others=1)
    counts = machine.run(60, asked=2, others=1)
    assert counts.count(1) > 0.95 * len(counts)
    assert 2 in counts  # its core may be free again


def test_the_thread_returns_when_the_other_program_ends(machine: Machine) -> None:
    machine.run(60, asked=2, others=1)
    counts = machine.run(10, asked=2, others=0)
    assert set(counts[-250:]) == {2}


def test_one_other_program_costs_one_of_many_threads(library: ctypes.CDLL) -> None:
    machine = Machine(library, 8)
    machine.run(1, asked=8, others=1)
    counts = machine.run(20, asked=8, others=1)
    assert counts.count(7) > 0.9 * len(counts)
    assert set(counts) == {7, 8}
    library.delete_threads(machine.threads)


def test_a_single_thread_stays(machine: Machine) -> None:
    assert set(machine.run(10, asked=1, others=3)) == {1}


def test_long_graphs_are_measured_one_by_one(machine: Machine) -> None:
    counts = machine.run(10, asked=2, others=1, step=0.5)
    assert counts[0] == 2
    assert counts.count(1) > len(counts) / 2


@pytest.fixture(params=KERNELS)
def kernel(library: ctypes.CDLL, request: pytest.FixtureRequest) -> bytes:
    name: bytes = request.param.encode()
    if not library.lanes_of(name):
        pytest.skip("not on this machine")
    return name


def exact_attention(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    mask: npt.NDArray[np.float16],
    sinks: FloatArray | None,
) -> tuple[FloatArray, FloatArray]:
    """Compute library.attend in 64 bits."""
    n_group = len(q) // len(k)
    k, v = (np.repeat(x.astype(np.float64), n_group, axis=0) for x in (k, v))
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]) + mask
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))
        logits = np.concatenate([logits, column], axis=-1)
    exps = np.exp(logits - np.maximum(logits.max(axis=-1, keepdims=True), -1e38))
    probs = (exps / np.maximum(exps.sum(axis=-1, keepdims=True), 1e-30))[..., : mask.shape[-1]]
    by_group = probs.reshape(-1, n_group, *probs.shape[1:])
    scores = np.stack([by_group, by_group**2]).mean(axis=2).sum(axis=2)
    return (probs @ v).transpose(1, 0, 2), scores


@pytest.mark.parametrize("sinks", [None, np.float32([-np.inf, -1e4, 0, 3, 30, 1e30])])
@pytest.mark.parametrize("n_tokens", [1, 3, 110])
def test_attention_has_the_same_bits_with_any_number_of_threads(
    library: ctypes.CDLL,
    kernel: bytes,
    rng: np.random.Generator,
    n_tokens: int,
    sinks: FloatArray | None,
) -> None:
    n_embd, n_head, n_head_kv, n_kv = 32, 6, 2, 1024

    def numbers(*shape: int) -> FloatArray:
        return rng.standard_normal(shape, dtype=np.float32)

    q = numbers(n_head, n_tokens, n_embd)
    k, v = numbers(n_head_kv, n_kv, n_embd), numbers(n_head_kv, n_kv, n_embd)
    mask = np.where(rng.random((n_tokens, n_kv)) < 0.3, -np.inf, 0).astype(np.float16)
    mask[:, 960:] = -np.inf
    mask[1:2] = -np.inf  # a token that attends only to sinks

    def attend(n_threads: int, n_slots: int) -> tuple[FloatArray, FloatArray]:
        out = np.full((n_tokens, n_head, n_embd), np.nan, dtype=np.float32)
        scores = np.zeros((2, n_head_kv, n_kv), dtype=np.float32)
        sizes = sizes_of(n_embd, n_head, n_head_kv, n_kv, n_tokens, n_slots, n_threads)
        library.attend(kernel, sizes, *map(pointer, (q, k, v, mask, sinks, scores, out)))
        return out, scores

    expected = attend(1, 1)
    atol = 0.03 if kernel == b"avx512bf16" else 1e-5
    for got, exact in zip(expected, exact_attention(q, k, v, mask, sinks), strict=True):
        np.testing.assert_allclose(got, exact, atol=atol, rtol=1e-5)
    for n_threads, n_slots in ((1, 7), (2, 2), (3, 3), (4, 4), (7, 7), (31, 31), (5, 2)):
        for got, wanted in zip(attend(n_threads, n_slots), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


N_PROMPT, N_AFTER = 700, 6
EVICTING: dict[str, Any] = {"hh": 160, "recent": 240, "slack": 112}
RECALL: dict[str, Any] = {"hh": 224, "recent": 200, "slack": 88, "recall": 64}
WHOLE = {"hh": 500, "recent": 500}
FULL = {"evict": False, "flash_attn": True}


def threads(n: int) -> dict[str, int]:
    return {"n_threads": n, "n_threads_batch": n}


def opened(path: Path, n_threads: int, settings: dict[str, Any]) -> Llama:
    return tiny_llama(path, n_ctx=1200, n_batch=128, **threads(n_threads), **settings)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all rows": ({}, WHOLE),
    "evicting": ({}, EVICTING),
    "multi-head": ({"n_head_kv": 4}, {**EVICTING, "policy": "h2o-far"}),
    "q8_0": ({}, {**EVICTING, **stored_as("q8_0")}),
    "q4_0": ({}, {**EVICTING, **stored_as("q4_0"), "policy": "roco"}),
    "recall": ({}, {**RECALL, "policy": "h2o-far"}),
    "multi-head recall": ({"n_head_kv": 4}, {**RECALL, "recall_type": "q8_0"}),
    "recall by ops": ({}, {**RECALL, "attention": "ops", "flash_attn": False}),
    "ops": ({}, {**EVICTING, "attention": "ops", "flash_attn": False}),
    "flash attention": ({}, {**EVICTING, "attention": "ops", "flash_attn": True}),
    "full": ({}, FULL),
    "windows": ({"arch_variant": "sliding_window"}, {**EVICTING, "policy": "h2o-far"}),
    "caps": ({"arch_variant": "gemma2"}, RECALL),
    "sinks": ({"arch_variant": "gpt_oss"}, RECALL),
}


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_the_same_with_any_number_of_threads(
    tmp_path: Path, rng: np.random.Generator, case: str
) -> None:
    """Also a saved text that resumes with another number."""
    model, settings = CASES[case]
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=4, **{"n_layer": 2, **model})
    prompt, after = random_tokens(rng, N_PROMPT), random_tokens(rng, N_AFTER)

    def continue_with(llm: Llama) -> list[FloatArray]:
        logits = []
        for token in after:
            llm.eval([token])
            logits.append(last_logits(llm))
        return logits

    one = opened(path, 1, settings)
    one.eval(prompt)
    state, logits = one.kv_state(), last_logits(one)
    expected = continue_with(one)
    for n_threads in (2, 3):
        llm = opened(path, n_threads, settings)
        llm.eval(prompt)
        np.testing.assert_array_equal(last_logits(llm), logits)
        for _ in range(2):
            np.testing.assert_array_equal(continue_with(llm), expected)
            if settings is not FULL:
                assert_same_cache(llm, one)
            llm.load_kv_state(state, np.array(prompt))
