"""Compare a cache on a device with one on the host, in a separate process.

Usage: rows_on_a_device.py DEVICE MODEL reference composed|flash POLICY CHUNK
       rows_on_a_device.py DEVICE MODEL host KV_TYPE GPU_LAYERS composed|flash
       rows_on_a_device.py DEVICE MODEL recall KV_TYPE composed|flash [GPU_LAYERS]
       rows_on_a_device.py DEVICE MODEL search KV_TYPE GPU_LAYERS FILE_OF_THE_ARCHIVE
       rows_on_a_device.py DEVICE MODEL slack
       rows_on_a_device.py DEVICE MODEL state KV_TYPE RECALL [GPU_LAYERS]
       rows_on_a_device.py DEVICE MODEL split
       rows_on_a_device.py DEVICE MODEL shared KV_TYPE GPU_LAYERS,... auto|ops kqv|host CHUNK
       rows_on_a_device.py DEVICE MODEL streams POLICY RECALL
       rows_on_a_device.py DEVICE MODEL text N_TOKENS
       rows_on_a_device.py DEVICE MODEL prefill KV_TYPE
       rows_on_a_device.py gpu|mock MODEL choice POLICY GPU_LAYERS
       rows_on_a_device.py gpu|mock MODEL turns LEAST_REBASES
       rows_on_a_device.py mock MODEL transfers POLICY OTHER_MODEL
       rows_on_a_device.py mock MODEL crossing KV_TYPE
       rows_on_a_device.py mock MODEL ring
       rows_on_a_device.py mock|queueing MODEL shortened
       rows_on_a_device.py mock MODEL pinned
       rows_on_a_device.py queueing MODEL waiting RECALL
       rows_on_a_device.py mock MODEL notes

DEVICE is the endpoint of an RPC server, or several separated by commas, "gpu" for this machine's
GPU, or "mock" for a mock GPU (tests/native/cuda_on_cpu/device.cpp). Other mocks are "coarse", which
rounds factors as tensor cores do, "flushing", which treats denormal floats as zero, and "queueing",
which computes only when the host waits for it.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compiled import ROOT, compile_library
from oracle import CLEAR_MARGIN, assert_same_steps, clear_steps
from pyh2o import Llama
from pyh2o.cache.native import device_bytes
from pyh2o.cache.settings import Budget, EvictionSettings
from pyh2o.core.batcher import MIN_ABORTABLE
from pyh2o.errors import DecodeError, StateError, UnsupportedModelError
from pyh2o.library import LIBRARY_FOLDER
from pyh2o.policies import H2O, H2ODecay, H2OFar, H2OMean, HeadRows, Policy, parse_policy
from research.reference import ReferenceLlama
from state_parts import State
from streams import N_SEQ, Context
from tiny_llama import (
    EXACT_ROWS,
    assert_same_cache,
    assert_same_future,
    random_tokens,
    stored_as,
)

# isort: split
import llama_cpp  # after pyh2o, so that it uses pyh2o's library

# cuBLAS would round inputs to ten bits, which is fast but makes comparisons inexact.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"

CHUNK = 7
N_POS = 64
N_TOKENS = 231
N_LAYERS = 4  # on a device and on the CPU
GPU, MOCK, COARSE, FLUSHING, QUEUEING = "gpu", "mock", "coarse", "flushing", "queueing"
MOCKS = (MOCK, COARSE, FLUSHING, QUEUEING)
# Their kernels round differently from the CPU's.
ROUNDING = (GPU, COARSE)
GPU_TOLERANCE = 2e-2
# All layers on the CPU with their large products, which a device would take.
HOST = {"n_gpu_layers": 0, "op_offload": False}

PROMPT = b"Once upon a time, in a town by the sea, there lived a clockmaker who"

FloatArray = npt.NDArray[np.float32]

made = partial(Llama, logits_all=True, n_threads=1, verbose=True)


def devices(device: str) -> dict[str, Any]:
    """Return settings with all layers on the device."""
    return {"n_gpu_layers": -1} if device in (GPU, *MOCKS) else {"rpc_servers": device}


def mock_device() -> ctypes.CDLL:
    """Add a mock GPU to ggml."""
    ggml = max(ROOT.glob("build/*/llama.cpp/ggml"), key=lambda path: path.stat().st_mtime)
    sources = ROOT / "tests" / "native" / "cuda_on_cpu"
    return compile_library(
        "device",
        [sources / "device.cpp"],
        [sources],
        LIBRARY_FOLDER.glob("libggml*"),
        others=[ggml / "include", ggml / "src"],
    )


def compare_with_reference(
    device: str, path: str, attention: str, policy: str, tokens_at_once: str
) -> None:
    reference = ReferenceLlama.from_gguf(
        path, heavy=12, recent=9, slack=CHUNK, n_pos=N_POS, policy=policy
    )
    budget = {"hh": 12, "recent": 9, "slack": CHUNK, "policy": policy, "recall": 0}
    flash = attention == "flash"
    llm = made(path, **budget, **devices(device), **EXACT_ROWS, flash_attn=flash)
    size = int(tokens_at_once)
    tolerance = GPU_TOLERANCE if flash or device in ROUNDING else 1e-4
    sizes: list[int | tuple[int, int]] = [size] * (N_TOKENS // size)
    if not flash:  # whose rounding needs a text without close choices
        sizes.insert(100 // size, (40, 95))  # partly evicted
    # the attention of one query is small
    margin = 2e-6 if policy.startswith("snap:queries=1,") else CLEAR_MARGIN
    steps, reference = clear_steps(reference, np.random.default_rng(5), sizes, margin=margin)
    assert_same_steps(llm, steps, logits=tolerance, scores=10 * tolerance)
    assert llm.kv.compactions == reference.n_compactions > 10
    assert llm.kv.rebases == reference.n_rebases > 4

    # The weights are on the device as well.
    assert (
        device_bytes(llm.text.model.address) > llm.kv.bytes_k + llm.kv.bytes_v + llm.kv.bytes_scores
    )
    llm.close()


def compare_with_host(
    device: str, path: str, kv_type: str, gpu_layers: str, attention: str
) -> None:
    """Moved rows have the same bytes; rotated rows are rounded by two different computations."""
    settings = {"hh": 12, "recent": 9, "slack": CHUNK, "recall": 0, **stored_as(kv_type)}
    ops = {"flash_attn": attention == "flash", "attention": "ops"}
    place = {**devices(device), "n_gpu_layers": int(gpu_layers)}
    on_device, on_host = (
        made(path, **settings, **ops, **place),
        made(path, **settings, **ops, **HOST),
    )
    other = made(path, **settings, **HOST, flash_attn=True)
    tokens = np.random.default_rng(6).integers(0, 384, 24 * CHUNK)
    for start in range(0, len(tokens), CHUNK):
        for llm in (on_device, on_host, other):
            llm.eval(tokens[start : start + CHUNK].tolist())
        if device not in ROUNDING:
            seen = slice(start, on_host.n_tokens)
            most = 0 if on_host.kv.rebases == 0 else 0.1
            np.testing.assert_allclose(on_device.scores[seen], on_host.scores[seen], 0, most)
    logits = (llm.scores[: llm.n_tokens] for llm in (on_device, on_host, other))
    assert_near(*logits, tolerance=0.15)  # one of so few rows is a large share
    assert on_device.kv.compactions == on_host.kv.compactions > 10
    assert on_device.kv.rebases == on_host.kv.rebases == 1
    for llm in (on_device, on_host, other):
        llm.close()


def compare_recall_with_host(
    device: str, path: str, kv_type: str, attention: str, gpu_layers: str = "-1"
) -> None:
    """Check that the same rows are archived, retrieved and restored, before and after a re-base."""
    budget = {"hh": 24, "recent": 16, "slack": CHUNK, "recall": 20, "n_ctx": 64}
    types = {"recall_type": "f32", **stored_as(kv_type)}
    settings = {**budget, **types, "flash_attn": attention == "flash"}
    place = {**devices(device), "n_gpu_layers": int(gpu_layers)}
    if place["n_gpu_layers"] > 0:
        place["attention"] = "ops"  # the host's own kernels would round differently
    # a device with our kernels retrieves rows by another estimate
    rounds = device in ROUNDING or (device in MOCKS and "attention" not in place)
    on_device = made(path, **settings, **place)
    on_host, other = (made(path, **settings, **HOST, attention=way) for way in ("ops", "auto"))
    tokens = np.random.default_rng(6).integers(0, 384, 24 * CHUNK)
    for start in range(0, len(tokens), CHUNK):
        for llm in (on_device, on_host, other):
            if start == 9 * CHUNK:
                llm.text.drop_spans([(20, 58)])
            if start == 14 * CHUNK:
                llm.pin_spans([(10, 14)])
            llm.eval(tokens[start : start + CHUNK].tolist())
        if not rounds:
            seen = slice(start, on_host.n_tokens)
            np.testing.assert_allclose(on_device.scores[seen], on_host.scores[seen], 0, 0)
    # 10-bit factors retrieve other rows: 0.019 on the coarse mock, 0.028 on an H200
    logits = (llm.scores[: llm.n_tokens] for llm in (on_device, on_host, other))
    assert_near(*logits, tolerance=0.05 if rounds else GPU_TOLERANCE)
    assert on_device.kv.rebases == on_host.kv.rebases == 1
    assert on_device.kv.found_share == pytest.approx(on_host.kv.found_share, rel=0.05)
    assert on_device.kv.found_share > 0
    for llm in (on_device, on_host, other):
        llm.close()


def compare_search_with_host(
    device: str, path: str, kv_type: str, gpu_layers: str, archive: str
) -> None:
    """Search on the device: first all evicted rows, then the best by another estimate."""
    settings = {"hh": 100, "recent": 100, "slack": 40, "recall": 150, "n_ctx": 230}
    settings |= {"recall_type": "f32", **stored_as(kv_type), "flash_attn": True}
    place = {**devices(device), "n_gpu_layers": int(gpu_layers)}
    on_device = made(path, **settings, **place, recall_archive=Path(archive) if archive else None)
    on_host, other = (made(path, **settings, **HOST, attention=way) for way in ("auto", "ops"))
    llms = (on_device, on_host, other)
    tokens = np.random.default_rng(6).integers(0, 384, 900).tolist()
    n_all = 0  # tokens after which all rows are retrieved
    for size in (40, 40, 1, 1, 1, 40, 1, 17, 5, 1, 40, *[40] * 14, *[1] * 30):
        for llm in llms:
            llm.eval(tokens[llm.n_tokens : llm.n_tokens + size])
        if on_host.n_tokens - on_host.kv.budget < settings["recall"]:
            n_all = on_host.n_tokens
        if on_host.n_tokens == 307:
            for llm in llms:
                llm.text.cache.reset_found()
                llm.text.drop_spans([(60, 120), (290, 304)])
    assert on_host.kv.rebases > 2
    assert n_all > 180

    def logits(first: int, end: int) -> list[FloatArray]:
        return [llm.scores[first:end] for llm in llms]

    if kv_type == "f16":
        for llm in (on_device, other):
            most = np.abs(llm.scores[:n_all] - on_host.scores[:n_all]).max()
            assert most < 0.01 or device in ROUNDING
    assert_near(*logits(0, n_all))
    assert_near(*logits(n_all, on_host.n_tokens), tolerance=0.05)
    # a single token attends to the passage that was retrieved most
    assert on_device.kv.found_share == pytest.approx(on_host.kv.found_share, rel=0.02)
    # CUDA graphs run again with the kernels' previous arguments
    for counter in ("n_replayed", "n_uncompared") if device in MOCKS else ():
        assert ctypes.c_uint64.in_dll(mock_device(), counter).value > 20
    looks = [llm.text.cache.found(llm.n_tokens) for llm in (on_device, on_host)]
    assert np.corrcoef(*looks)[0, 1] > 0.99
    for weights in looks:
        assert weights[20:60].any()
        assert not weights[60:120].any()
        assert not weights[290:304].any()
    for llm in llms:
        llm.close()


def compare_with_going_on(
    device: str, path: str, kv_type: str, recall: str, gpu_layers: str = "-1"
) -> None:
    """Check that a loaded state continues bit for bit like the saved text."""
    settings = {"hh": 24, "recent": 16, "slack": 20, "recall": int(recall), "n_ctx": N_POS}
    settings |= {**devices(device), "n_gpu_layers": int(gpu_layers), **stored_as(kv_type)}
    saved, loaded = made(path, **settings), made(path, **settings)
    rng = np.random.default_rng(8)
    loaded.eval(random_tokens(rng, 30))  # the previous content must not matter
    for _ in range(3):
        saved.eval(random_tokens(rng, 50))
        loaded.load_kv_state(saved.kv_state(), saved.input_ids[: saved.n_tokens])
        assert_same_future(saved, loaded, random_tokens(rng, 10))
    assert saved.kv.compactions > 2
    saved.close()
    loaded.close()


def compare_shared_layers(
    device: str, path: str, kv_type: str, gpu_layers: str, attention: str, kqv: str, most: str
) -> None:
    """Put some layers on the device, as each number says.

    Batches are large enough for the device to take the CPU's products, or single tokens, before and
    after a compaction.
    """
    chunk = int(most)
    budget = {"hh": min(chunk, 64), "recent": min(chunk, 64), "slack": chunk, "policy": "h2o"}
    settings = {**budget, "recall": 0, **stored_as(kv_type), "flash_attn": True}
    ways = {"offload_kqv": kqv == "kqv", "attention": attention}
    shared = [made(path, **settings, **ways, n_gpu_layers=int(n)) for n in gpu_layers.split(",")]
    on_host, with_ops = (made(path, **settings, **HOST, attention=way) for way in ("auto", "ops"))
    tokens = np.random.default_rng(7).integers(0, 384, 5 * chunk).tolist()
    for size in (chunk, 1, 1, chunk, 1, 40, chunk):
        for llm in (*shared, on_host, with_ops):
            llm.eval(tokens[llm.n_tokens : llm.n_tokens + size])
        if kv_type != "f16" and on_host.kv.compactions > 0:
            continue  # other kernels round quantised rows differently, so other rows may be kept
        for llm in shared:
            compare_rows(device, kv_type, llm, on_host, with_ops)
    sizes = [device_bytes(llm.text.model.address) for llm in shared]
    assert sizes == sorted(set(sizes))
    for llm in shared:
        assert llm.kv.compactions == on_host.kv.compactions > 0
        assert_near(*(each.scores[: llm.n_tokens] for each in (llm, on_host, with_ops)))
    for llm in (*shared, on_host, with_ops):
        llm.close()


def compare_streams_with_host(device: str, path: str, policy: str, recall: str) -> None:
    """Read prompts of several texts at once, and compare the retrieved rows."""
    budget = Budget(
        EvictionSettings(policy=parse_policy(policy), recall_type="f32"),
        window=256,
        heavy=24,
        recent=24,
        slack=60,
        recall=int(recall),
    )
    there, here = (
        Context(Path(path), flash_attention=True, n_gpu_layers=n_layers) for n_layers in (-1, 0)
    )
    rng = np.random.default_rng(11)
    for context in (there, here):
        context.attach(budget)
    for first in range(0, 240, 20):
        chunks = {seq: (first, rng.integers(0, 384, 20).tolist()) for seq in range(N_SEQ)}
        assert there.decode(chunks) == here.decode(chunks) == 0
        for seq in range(N_SEQ):
            np.testing.assert_allclose(
                *(context.last_logits(20 * seq + 19) for context in (there, here)), atol=0.05
            )
            (positions, scores), (expected_positions, expected) = (
                context.of[seq].rows(0) for context in (there, here)
            )
            np.testing.assert_array_equal(positions, expected_positions)
            np.testing.assert_allclose(scores, expected, rtol=GPU_TOLERANCE)
    assert there.of[0].statistics(240).compactions > 1
    for context in (there, here):
        context.close()


def compare_rows(device: str, kv_type: str, shared: Llama, on_host: Llama, with_ops: Llama) -> None:
    """Compare the rows of all layers, and the scores approximately."""
    for layer in range(on_host.text.n_layer):
        (positions, scores), (expected_positions, expected), (_, other) = (
            llm.kv_rows(layer) for llm in (shared, on_host, with_ops)
        )
        if not expected_positions.size:
            continue
        assert np.abs(scores).sum() > 1
        if np.array_equal(positions, expected_positions):
            if kv_type == "f16":
                np.testing.assert_allclose(scores, expected, atol=10 * GPU_TOLERANCE)
            else:
                assert_near(*map(np.asarray, (scores, expected, other)), tolerance=0.1)
            continue
        assert device in ROUNDING  # this decides which choices are close
        for mine, theirs in zip(positions, expected_positions, strict=True):
            assert len(np.intersect1d(mine, theirs)) > 0.95 * len(theirs)


def assert_near(
    mine: FloatArray, on_host: FloatArray, other: FloatArray, tolerance: float = GPU_TOLERANCE
) -> str:
    """Compare logits or scores with the CPU's up to rounding. Return the difference.

    Quantised weights or rows amplify rounding. The tolerance is measured on the CPU, between our
    kernel and ggml's ops.
    """
    ours, usual = (np.abs(logits - on_host) for logits in (mine, other))
    assert np.isfinite(mine).all()
    line = (
        f"differ by {ours.mean():.3f}, at most {ours.max():.3f}, on the CPU between kernel "
        f"and ops by {usual.mean():.3f}, at most {usual.max():.3f}"
    )
    assert ours.mean() <= max(2 * usual.mean(), tolerance), line
    return line


def compare_slack_with_host(device: str, path: str) -> None:
    """Compare default slack: a GPU has more, so that chunks are whole batches.

    A state loads only with the same slack.
    """
    settings = {"n_ctx": 2048, "recall": 0, "policy": "h2o", "flash_attn": True}
    usual, more = 104, 512 if device in (GPU, *MOCKS) else 104
    on_host, with_more = (
        made(path, **settings, n_gpu_layers=0, slack=slack) for slack in (None, more)
    )
    on_device, with_usual = (
        made(path, **settings, **devices(device), slack=slack) for slack in (None, usual)
    )
    tokens = np.random.default_rng(8).integers(0, 384, 1000)
    for there, here, slack in ((on_device, with_more, more), (with_usual, on_host, usual)):
        for llm in (there, here):
            llm.eval(tokens.tolist())
            assert llm.kv.slack == llm.text.model.n_batch == slack
        np.testing.assert_allclose(there.scores[:1000], here.scores[:1000], atol=GPU_TOLERANCE)
        assert there.kv.compactions == here.kv.compactions > 0
    state = on_host.kv_state()
    with_usual.load_kv_state(state, tokens)
    if more > usual:
        with pytest.raises(StateError, match="other settings"):
            on_device.load_kv_state(state, tokens)
    for llm in (on_host, with_more, on_device, with_usual):
        llm.close()


def compare_prefill_with_host(device: str, path: str, kv_type: str) -> None:
    """The only compaction of an exact prefill moves rows of the larger cache."""
    settings = {"hh": 20, "recent": 20, "slack": CHUNK, "recall": 0, "attention": "ops"}
    settings |= {"flash_attn": True, "prefill": "exact", **stored_as(kv_type)}
    on_device, on_host = made(path, **settings, **devices(device)), made(path, **settings)
    for tokens in np.random.default_rng(10).integers(0, 384, (2, 60)).tolist():
        on_device.eval(tokens)
        on_host.eval(tokens)
    np.testing.assert_array_equal(on_device.scores[:120], on_host.scores[:120])
    assert on_device.kv.compactions == on_host.kv.compactions > 0
    on_device.close()
    on_host.close()


class ByTheHost(H2O):
    """Computes the library's scores outside of it, so that no device selects by them."""


class MeanByTheHost(H2OMean):
    """As `ByTheHost`."""


class DecayByTheHost(H2ODecay):
    """As `ByTheHost`."""


class FarByTheHost(H2OFar):
    """As `ByTheHost`, bit for bit."""

    def score(self, rows: HeadRows) -> npt.NDArray[np.floating[Any]]:
        rate = math.log(2) / self.half_life
        ages = np.maximum(rows.ages - min(self.near, rows.n_recent), 1)
        return rows.attention / [math.expm1(-n * rate) / math.expm1(-rate) for n in ages]


BY_THE_HOST: dict[type[Policy], type[Policy]] = {
    H2O: ByTheHost,
    H2OMean: MeanByTheHost,
    H2ODecay: DecayByTheHost,
    H2OFar: FarByTheHost,
}


def compare_choice_with_host(device: str, path: str, policy: str, gpu_layers: str) -> None:
    """Check for the same rows with the same scores bit for bit, selected on either side."""
    native = parse_policy(policy)
    other = BY_THE_HOST[type(native)](
        **{name: getattr(native, name) for name in native.parameters()}
    )
    settings = {"hh": 24, "recent": 8, "slack": 3, "recall": 12, "n_ctx": N_POS}
    settings |= {**devices(device), "n_gpu_layers": int(gpu_layers), "flash_attn": True}
    both = by_device, by_host = [made(path, **settings, policy=one) for one in (native, other)]
    rng = np.random.default_rng(11)
    n_read, n_read_by_host = [], []
    for step in range(45):
        tokens = random_tokens(rng, int(rng.integers(1, 4)))
        seen, n_before = by_device.n_tokens, by_device.kv.compactions
        n_read.append(crossed(by_device.eval, tokens)[0])
        n_read_by_host.append(crossed(by_host.eval, tokens)[0])
        assert_same_cache(by_device, by_host)
        np.testing.assert_array_equal(*(llm.scores[seen : llm.n_tokens] for llm in both))
        if by_device.kv.compactions == n_before or 20 < step <= 25:
            assert n_read.pop() == n_read_by_host.pop()
        for llm in both:
            if step == 20:
                llm.share_fairly([30, 60])
            elif step == 25:
                llm.share_fairly([])
                llm.pin_spans([(10, 12)])
            elif step == 30:
                assert llm.text.remove_tail(llm.n_tokens - 3)
            elif step == 35:
                state, text = llm.kv_state(), llm.input_ids[: llm.n_tokens].copy()
                llm.reset()
                llm.eval(random_tokens(np.random.default_rng(12), 30))
                llm.load_kv_state(state, text)
    assert len(n_read) > 15
    assert device not in MOCKS or (np.array(n_read) < np.array(n_read_by_host)).all()
    assert by_device.kv.compactions == by_host.kv.compactions
    assert by_device.kv.rebases == by_host.kv.rebases > 0
    for llm in both:
        state = State(llm.kv_state(), llm.kv.used, llm.kv.bytes_archive)
        state.rows[1].view(np.float16)[state.used[0] * 64] = np.nan  # devices get the last layers
        llm.load_kv_state(state.bytes(), llm.input_ids[: llm.n_tokens].copy())
        with pytest.raises(DecodeError):
            llm.eval(random_tokens(rng, 6))
        llm.close()


def compare_turns_with_host(device: str, path: str, n_rebases: str) -> None:
    """Check that keys rotated by a re-base have the same bytes on either side."""
    settings = {"hh": 24, "recent": 8, "slack": 3, "recall": 12, "n_ctx": N_POS}
    settings |= {"flash_attn": True}
    both = on_device, on_host = [
        made(path, **settings, **where) for where in (devices(device), HOST)
    ]
    rng = np.random.default_rng(13)
    for _ in range(50):
        tokens = random_tokens(rng, 2)
        on_host.load_kv_state(on_device.kv_state(), on_device.input_ids[: on_device.n_tokens])
        before = on_device.kv
        n_read = crossed(on_device.eval, tokens)[0]
        on_host.eval(tokens)
        assert on_device.kv.rebases == on_host.kv.rebases
        if on_device.kv.rebases == before.rebases:
            continue
        mine, other = (State(llm.kv_state(), llm.kv.used, llm.kv.bytes_archive) for llm in both)
        old = mine.used[mine.cell_positions < on_device.n_tokens - len(tokens)]
        for layer in range(2):
            np.testing.assert_array_equal(mine.rotary[layer], other.rotary[layer])
            keys, expected = (
                one.rows[layer][: len(one.rows[layer]) // 2].reshape(-1, 2 * State.ROW)[old]
                for one in (mine, other)
            )
            np.testing.assert_array_equal(keys, expected)
        # logits and archived keys, but not all keys
        n_archived = on_device.kv.archived - before.archived
        per_cell = (before.bytes_k + before.bytes_v) // before.cells
        n_most = 4 * 384 * len(tokens) + (n_archived + before.used // 2) * per_cell
        assert n_read < n_most
    assert on_device.kv.rebases >= int(n_rebases)
    for llm in both:
        llm.close()


def count_transfers(device: str, path: str, policy: str, deeper: str) -> None:
    """Count copies between the host and a device during a compaction and the tokens after it."""

    mock = mock_device()

    def transfers(path: str, n_tokens: int, recall: int = 0) -> int:
        budget = {"hh": 2 * n_tokens + recall, "recent": n_tokens, "slack": n_tokens}
        llm = made(path, **budget, recall=recall, policy=policy, **devices(device))
        rng = np.random.default_rng(8)
        while llm.kv.compactions < 2:
            mock.count_transfers()
            llm.eval(rng.integers(0, 384, n_tokens).tolist())
        res: int = mock.count_transfers()
        assert llm.kv.rows_moved > 0
        llm.close()
        return res

    assert transfers(deeper, CHUNK) == transfers(path, CHUNK) > 0

    # the collected sums are copied again if the batch can be aborted
    for recall, n_copies in ((0, 0), (16, 1)):
        asked, unasked = (transfers(path, MIN_ABORTABLE - i, recall) for i in range(2))
        assert asked - unasked == n_copies


def crossed(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Return the bytes that a call reads and writes in device memory, and its blocking reads."""
    counters = ("bytes_read", "bytes_written", "n_reads")
    values = [ctypes.c_uint64.in_dll(mock_device(), name) for name in counters]
    before = [value.value for value in values]
    function(*arguments)
    return [value.value - old for value, old in zip(values, before, strict=True)]


def count_what_crosses(device: str, path: str, kv_type: str) -> None:
    """Count the bytes of a token's logits and retrieval weights, and of restored rows.

    There is no memory for copies of archived rows.
    """
    os.environ["MOCK_FREE"] = str(2**30)
    budget = {"hh": 160, "recent": 100, "slack": 2 * CHUNK, "recall": 20}
    settings = {**budget, **stored_as(kv_type), "flash_attn": True}
    llm = made(path, **settings, **devices(device))
    rng = np.random.default_rng(8)

    def one_by_one(tokens: list[int]) -> None:
        for token in tokens:
            llm.eval([token])

    llm.eval(rng.integers(0, 384, 330).tolist())
    per_cell = (llm.kv.bytes_k + llm.kv.bytes_v) // llm.kv.cells
    for _ in range(5 * CHUNK):
        kv = llm.kv
        n_archived = 128 * (kv.archived // 128 + 2)  # in whole pages
        of_token = 4 * 384 + 8 * (1 + N_LAYERS * 2 + n_archived // 32)  # logits; sums
        # the second token waits for nothing, although it needs the first one's retrieval weights
        n_read, _, n_waits = crossed(one_by_one, rng.integers(0, 384, 2).tolist())
        if llm.kv.compactions == kv.compactions:
            assert n_read <= 2 * of_token
            assert n_waits == 0
            continue
        assert llm.kv.archived - kv.archived > CHUNK  # the device writes these in place
        # a bit per row says what stays, and a word per head whether its scores are finite
        n_bits = kv.bytes_scores // 32 + N_LAYERS * 2 * 4
        assert n_read <= 3 * of_token + 8 * n_archived + n_bits
        assert n_waits <= 2

    # a 16-bit mask for each row and token, but no 32-bit weights
    while llm.kv.compactions == kv.compactions:
        kv = llm.kv
        llm.eval(rng.integers(0, 384, 1).tolist())
    kv = llm.kv
    _, n_written, _ = crossed(llm.eval, rng.integers(0, 384, 10).tolist())
    assert llm.kv.compactions == kv.compactions
    assert n_written <= (10 * 2 + 4) * kv.cells + 8192

    kv, pins = llm.kv, range(100, 110)
    assert not all(np.isin(pins, rows).all() for rows in llm.kv_rows(0)[0])
    n_read, n_written, _ = crossed(llm.text.cache.pin_spans, [(pins[0], pins[-1] + 1)])
    assert all(np.isin(pins, rows).all() for rows in llm.kv_rows(0)[0])
    n_rows = 2 * len(pins)
    assert n_read <= n_rows * per_cell + kv.bytes_scores + of_token + 8 * n_archived
    indices = 16 * (llm.kv.rows_moved - kv.rows_moved) + 8 * N_LAYERS * n_rows
    assert n_written <= n_rows * per_cell + 2 * kv.bytes_scores + indices
    llm.close()


def compare_ring_with_host(device: str, path: str) -> None:
    """Check retrieval from a ring buffer of pages that wrapped around.

    The oldest pages were dropped, and the device has memory for only some rows.
    """
    os.environ["MOCK_FREE"] = str(2**30 + 2**17)
    settings = EvictionSettings(policy=parse_policy("streaming"), recall_type="f32", recall_mib=1)
    budget = Budget(settings, window=256, heavy=24, recent=24, slack=60, recall=60)
    contexts = [
        Context(Path(path), flash_attention=True, n_gpu_layers=n_layers) for n_layers in (-1, 0)
    ]
    for context in contexts:
        context.attach(budget)
    rng = np.random.default_rng(14)
    n = first = 58 * 128  # 64 pages fit
    for size in (*[60] * 18, *[1] * 10, 60):
        tokens = rng.integers(0, 384, size).tolist()
        looks = []
        for context in contexts:
            assert context.decode({0: (n, tokens)}) == 0
            looks.append(context.of[0].found(n + size))
            context.of[0].reset_found()
        n += size
        assert n < first + 100 or np.corrcoef(*looks)[0, 1] > 0.9
    kv = contexts[0].of[0].statistics(n)
    assert kv.unarchived > 5 * 128
    for context in contexts:
        context.close()


def compare_shortened_with_anew(device: str, path: str) -> None:
    """Check that a shortened text never retrieves copies of rows after its new end.

    The device has memory for copies of four pages. The oracle reads the same text anew without
    copies, with the same kernels.
    """
    settings = {"hh": 88, "recent": 24, "slack": 40, "recall": 64, "n_ctx": 256}
    settings |= {"recall_type": "f32", **devices(device), "flash_attn": True}
    rng = np.random.default_rng(14)
    text, removed, added = (random_tokens(rng, n) for n in (760, 400, 200))

    def reset(llm: Llama) -> None:
        llm.eval(removed)
        llm.reset()
        llm.eval(text)

    def load_state(llm: Llama) -> None:
        state = llm.kv_state()
        llm.eval(removed)
        llm.load_kv_state(state, text)

    def remove_tail(llm: Llama) -> None:
        llm.text.cache.mark()
        llm.eval(removed[:8])
        assert llm.text.remove_tail(len(text))

    def results(n_copies: int, *changes: Callable[[Llama], None]) -> list[FloatArray]:
        os.environ["MOCK_FREE"] = str(2**30 + n_copies * 2**15)
        with made(path, **settings) as llm:
            llm.eval(text)
            for change in changes:
                change(llm)
            llm.text.cache.reset_found()
            for size in (190, *[1] * 10):
                llm.eval(added[llm.n_tokens - len(text) :][:size])
            found = llm.text.cache.found(llm.n_tokens)
            assert np.flatnonzero(found)[0] < len(text) - 4 * 128  # a row without a copy
            return [llm.scores[len(text) : llm.n_tokens].copy(), found, *llm.kv_rows(0)]

    anew = results(0)
    for change in (load_state, reset):
        for mine, expected in zip(results(4, change, remove_tail), anew, strict=True):
            np.testing.assert_array_equal(mine, expected)


def compare_without_pinned_memory(device: str, path: str) -> None:
    """The CPU searches from the first row without memory on, and retrieves the same rows."""
    settings = {"hh": 24, "recent": 16, "slack": 40, "recall": 20, "n_ctx": N_POS}
    left = ctypes.c_uint64.in_dll(mock_device(), "pinned_left")
    made_here = partial(made, path, **settings, **devices(device), flash_attn=True)
    rng = np.random.default_rng(15)
    with made_here() as cut, made_here() as without, made_here() as fresh:
        unlimited, left.value = left.value, 400_000  # eight pages
        cut.eval(random_tokens(rng, 1200))
        left.value = 0
        without.eval(random_tokens(rng, 100))
        without.load_kv_state(cut.kv_state(), cut.input_ids[: cut.n_tokens])
        assert_same_future(cut, without, random_tokens(rng, 100))
        left.value = unlimited
        cut.reset()
        assert_same_future(cut, fresh, random_tokens(rng, 200))


def compare_with_waiting(device: str, path: str, recall: str) -> None:
    """Check that every operation waits for the results of the previous batch."""
    waiting, hasty = (logits_of_changes(path, int(recall), waits=waits) for waits in (True, False))
    np.testing.assert_array_equal(hasty, waiting)


def logits_of_changes(path: str, recall: int, *, waits: bool) -> FloatArray:
    """Return logits after every operation, each after a batch, and the retrieval weights."""
    context = Context(Path(path), flash_attention=True)
    settings = EvictionSettings(policy=parse_policy("h2o-far:near=4,half_life=20"))
    context.attach(Budget(settings, window=256, heavy=24, recent=24, slack=60, recall=recall))
    cache, other = context.of[:2]
    rng = np.random.default_rng(11)
    ends = [0, 0]
    states = []
    looks = []

    def read(sizes: Sequence[int]) -> None:
        chunks = {
            seq: (ends[seq], rng.integers(0, 384, n).tolist()) for seq, n in enumerate(sizes) if n
        }
        assert context.decode(chunks) == 0
        for seq, n in enumerate(sizes):
            ends[seq] += n
        if waits:
            llama_cpp.llama_synchronize(context.context)

    def remove_tail() -> None:
        ends[0] -= 5
        assert cache.remove_tail(ends[0])

    def load_state() -> None:
        other.clear(alone=False, zero=False)
        other.load_state(states[0], n_saved)
        ends[1] = n_saved

    def clear() -> None:
        cache.clear(alone=False, zero=False)
        ends[0] = 0

    def clear_all() -> None:
        cache.clear(alone=True, zero=True)
        ends[:] = 0, 0

    for _ in range(21 if recall else 3):  # more than fit into one block of pinned memory
        read((54, 10))
    n_saved = ends[0]
    for change in (
        lambda: states.append(cache.state()),
        lambda: looks.append(cache.statistics(ends[0]).found_share),
        lambda: cache.pin_spans([(10, 14)]),
        lambda: cache.share_fairly([60]),
        lambda: cache.drop_spans([(60, 90)]),
        lambda: looks.append(cache.found(ends[0]).sum()),
        cache.reset_found,
        cache.mark,
        remove_tail,
        lambda: looks.append(cache.rows(0)[1].sum()),
        load_state,
        lambda: cache.enlarge(600),
        cache.shrink,
        clear,
        clear_all,
    ):
        change()
        read((7, 5))
    read((1, 1))
    assert min(looks) > 0 or recall == 0
    logits = [*looks, *context.last_logits(0), *context.last_logits(1)]
    context.close()
    return np.array(logits, np.float32)


def check_notes(device: str, path: str) -> None:
    """Check that each note is printed once, and only if it applies."""
    settings = {"hh": 24, "recent": 16, "slack": 20, "n_ctx": 64, "flash_attn": True}
    tokens = np.random.default_rng(8).integers(0, 384, 80).tolist()

    def noted(
        n_tokens: int = 80, pinned: int = 2**40, fair: bool = False, **other: Any
    ) -> list[str]:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            patch.setattr("pyh2o.cache.native.total_bytes", lambda: 4 * pinned)
            llm = made(path, **{**settings, **devices(device), **other})
            llm.share_fairly([30] if fair else [])
            llm.eval(tokens[:n_tokens])
            llm.close()
        return [str(each.message) for each in found]

    def on_the_cpu(cause: str, **other: Any) -> None:
        (line,) = noted(**other)
        assert line.startswith("the CPU ")
        assert cause in line

    assert noted() == []
    assert noted(0, recall=0) == noted(0, policy="streaming") == []
    on_the_cpu("lower recall_mib ", pinned=1)
    on_the_cpu("fair shares", fair=True)


def refuse_split_heads(device: str, path: str) -> None:
    """Compaction selects rows head by head, so all heads of a layer must be on one device."""
    with pytest.raises(UnsupportedModelError, match="split_mode = LLAMA_SPLIT_MODE_LAYER"):
        Llama(
            path,
            **devices(device),
            split_mode=llama_cpp.LLAMA_SPLIT_MODE_TENSOR,
            flash_attn=True,
            verbose=False,
        )


def compare_text(device: str, path: str, n_tokens: str) -> None:
    """Compare logits along a greedy text of the CPU."""
    n = int(n_tokens)
    on_cpu = logits_along(path, n, **HOST)
    text = on_cpu.argmax(axis=1).tolist()
    # 16-bit rows are rounded if a device rounds factors
    with_ops = logits_along(path, n, text, **HOST, **EXACT_ROWS, attention="ops")
    on_device = logits_along(path, n, text, **devices(device))
    line = assert_near(on_device, on_cpu, with_ops)
    others = np.flatnonzero(on_device.argmax(axis=1) != on_cpu.argmax(axis=1))
    print(f"{n - len(others)} of {n} choices; logits {line}")
    if len(others):
        second, best = np.sort(on_cpu[others[0]])[-2:]
        assert best - second <= max(np.abs(with_ops - on_cpu).max(), GPU_TOLERANCE), line


def logits_along(path: str, n: int, text: list[int] | None = None, **settings: Any) -> FloatArray:
    """Return [n, n_vocab] before each token after a prompt: of a text, or greedily sampled."""
    budget = {"hh": 20, "recent": 20, "slack": 16, "recall": 0}
    rows = []
    with Llama(path, **budget, **settings, logits_all=True, verbose=False) as llm:
        llm.eval(llm.tokenize(PROMPT))
        for i in range(n):
            rows.append(llm.scores[llm.n_tokens - 1].copy())
            llm.eval([int(rows[-1].argmax()) if text is None else text[i]])
    return np.stack(rows)


if __name__ == "__main__":
    device, path, other, *settings = sys.argv[1:]
    compare = {
        "reference": compare_with_reference,
        "host": compare_with_host,
        "recall": compare_recall_with_host,
        "search": compare_search_with_host,
        "slack": compare_slack_with_host,
        "state": compare_with_going_on,
        "split": refuse_split_heads,
        "shared": compare_shared_layers,
        "streams": compare_streams_with_host,
        "text": compare_text,
        "prefill": compare_prefill_with_host,
        "choice": compare_choice_with_host,
        "turns": compare_turns_with_host,
        "transfers": count_transfers,
        "crossing": count_what_crosses,
        "ring": compare_ring_with_host,
        "shortened": compare_shortened_with_anew,
        "pinned": compare_without_pinned_memory,
        "waiting": compare_with_waiting,
        "notes": check_notes,
    }[other]
    if device in MOCKS:
        mock_device().add_device(device == COARSE, device == FLUSHING, device == QUEUEING)
    compare(device, path, *settings)
