"""Compares a cache on a device with another, in a process of its own.

Usage: rows_on_a_device.py DEVICE MODEL reference composed|flash POLICY CHUNK
       rows_on_a_device.py DEVICE MODEL host KV_TYPE GPU_LAYERS composed|flash
       rows_on_a_device.py DEVICE MODEL recall KV_TYPE
       rows_on_a_device.py DEVICE MODEL split
       rows_on_a_device.py DEVICE MODEL refused
       rows_on_a_device.py DEVICE MODEL shared KV_TYPE GPU_LAYERS auto|ops kqv|host

DEVICE is the endpoint of an RPC server, or several with commas between them, "gpu" for this
machine's own, or "mock" for a GPU that is none (tests/native/cuda_on_cpu/device.cpp).
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from compiled import ROOT, compile_library
from oracle import assert_same_rows, read, rows_of
from pyh2o import Llama
from pyh2o.cache.native import device_bytes
from pyh2o.errors import SettingsError, UnsupportedModelError
from pyh2o.library import LIBRARY_FOLDER
from research.reference import ReferenceLlama
from some_policies import in_research
from tiny_llama import EXACT_ROWS, stored_as

# isort: split
import llama_cpp  # after pyh2o, whose library it then runs on

CHUNK = 7
N_POS = 64
N_TOKENS = 231
# A device asks for products of the CPU's layers from 32 tokens on.
SHARED_CHUNK, N_LAYERS = 64, 4
# A GPU computes with other kernels, which round differently.
GPU, MOCK = "gpu", "mock"
GPU_TOLERANCE = 2e-2
# Keeps the same rows whatever is rounded how, and moves many.
SAME_ROWS = in_research("random_rows:RandomRows")

made = partial(Llama, logits_all=True, n_threads=1, verbose=True)


def devices(device: str) -> dict[str, Any]:
    """Settings: all layers on the device."""
    return {"n_gpu_layers": -1} if device in (GPU, MOCK) else {"rpc_servers": device}


def add_mock_device() -> None:
    """From now on ggml has a GPU that is none."""
    ggml = max(ROOT.glob("build/*/llama.cpp/ggml"), key=lambda path: path.stat().st_mtime)
    sources = ROOT / "tests" / "native" / "cuda_on_cpu"
    compile_library(
        "device",
        [sources / "device.cpp"],
        [sources],
        LIBRARY_FOLDER.glob("libggml*"),
        others=[ggml / "include", ggml / "src"],
    ).add_device()


def compare_with_reference(
    device: str, path: str, attention: str, policy: str, tokens_at_once: str
) -> None:
    reference = ReferenceLlama.from_gguf(
        path, heavy=12, recent=9, slack=CHUNK, n_pos=N_POS, policy=policy
    )
    budget = {"hh": 12, "recent": 9, "slack": CHUNK, "policy": policy, "recall": 0}
    flash = attention == "flash"
    llm = made(path, **budget, **devices(device), **EXACT_ROWS, flash_attn=flash)
    tokens = np.random.default_rng(5).integers(0, 384, N_TOKENS)
    size = int(tokens_at_once)
    tolerance = GPU_TOLERANCE if attention == "flash" or device == GPU else 1e-4
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size].tolist()
        expected = read(reference, chunk)
        llm.eval(chunk)
        np.testing.assert_allclose(llm.scores[start : llm.n_tokens], expected, atol=tolerance)
        assert_same_rows(llm.kv_rows, rows_of(reference), scores=10 * tolerance)
    assert llm.kv.compactions == reference.n_compactions > 10
    assert llm.kv.rebases == reference.n_rebases > 4

    # The weights are there as well.
    assert (
        device_bytes(llm.text.model.address) > llm.kv.bytes_k + llm.kv.bytes_v + llm.kv.bytes_scores
    )

    state, more = llm.kv_state(), tokens[:20].tolist()
    futures = []
    for _ in range(2):
        llm.load_kv_state(state, tokens)
        llm.eval(more)
        futures.append(llm.scores[len(tokens) : llm.n_tokens].copy())
    np.testing.assert_array_equal(*futures)
    llm.close()


def tolerance_of(device: str, kv_type: str) -> float:
    """Of logits: on a GPU the last bits of a key decide what few bits it is rounded to."""
    return {"q8_0": 0.3, "q4_0": 0.4}.get(kv_type, 0.1) if device == GPU else 0.1


def compare_with_host(
    device: str, path: str, kv_type: str, gpu_layers: str, attention: str
) -> None:
    """Moved rows are the same bytes; rotated ones are rounded twice, by two computations."""
    tolerance = tolerance_of(device, kv_type)
    settings = {"hh": 12, "recent": 9, "slack": CHUNK, "recall": 0, "attention": "ops"}
    settings |= {"policy": SAME_ROWS, "flash_attn": attention == "flash", **stored_as(kv_type)}
    place = {**devices(device), "n_gpu_layers": int(gpu_layers)}
    on_device, on_host = made(path, **settings, **place), made(path, **settings, n_gpu_layers=0)
    tokens = np.random.default_rng(6).integers(0, 384, 24 * CHUNK)
    for start in range(0, len(tokens), CHUNK):
        for llm in (on_device, on_host):
            llm.eval(tokens[start : start + CHUNK].tolist())
        seen = slice(start, on_host.n_tokens)
        if on_host.kv.rebases == 0 and device != GPU:
            np.testing.assert_array_equal(on_device.scores[seen], on_host.scores[seen])
        else:
            np.testing.assert_allclose(on_device.scores[seen], on_host.scores[seen], atol=tolerance)
    assert on_device.kv.compactions == on_host.kv.compactions > 10
    assert on_device.kv.rebases == on_host.kv.rebases == 1
    on_device.close()
    on_host.close()


def compare_recall_with_host(device: str, path: str, kv_type: str) -> None:
    """The same rows are archived and found, before and after a re-base."""
    budget = {"hh": 24, "recent": 16, "slack": CHUNK, "recall": 20, "n_ctx": 64}
    types = {"recall_type": "f32", **stored_as(kv_type)}
    settings = {**budget, **types, "flash_attn": True, "attention": "ops"}
    on_device, on_host = made(path, **settings, **devices(device)), made(path, **settings)
    tokens = np.random.default_rng(6).integers(0, 384, 24 * CHUNK)
    for start in range(0, len(tokens), CHUNK):
        for llm in (on_device, on_host):
            llm.eval(tokens[start : start + CHUNK].tolist())
        seen = slice(start, on_host.n_tokens)
        if on_host.kv.rebases == 0:
            np.testing.assert_allclose(on_device.scores[seen], on_host.scores[seen], atol=0.05)
    assert on_device.kv.rebases == on_host.kv.rebases == 1
    assert on_device.kv.found_share == pytest.approx(on_host.kv.found_share, rel=0.05)
    assert on_device.kv.found_share > 0
    assert np.isfinite(on_device.scores[: on_device.n_tokens]).all()
    tail = on_device.n_tokens
    state = on_device.kv_state()
    on_device.load_kv_state(state, tokens)
    assert on_device.kv_state() == state
    assert on_device.n_tokens == tail
    on_device.close()
    on_host.close()


def compare_shared_layers(
    device: str, path: str, kv_type: str, gpu_layers: str, attention: str, kqv: str
) -> None:
    """Some layers here and some there: batches of a size that devices ask the CPU for, and single
    tokens, before and after a compaction."""
    budget = {"hh": 64, "recent": 64, "slack": SHARED_CHUNK, "policy": "h2o", "recall": 0}
    ways = {"offload_kqv": kqv == "kqv", "flash_attn": True, "attention": attention}
    settings = {**budget, **ways, **stored_as(kv_type)}
    shared, on_host = (made(path, **settings, n_gpu_layers=n) for n in (int(gpu_layers), 0))
    # the last bit of an element of four decides what a row attends to
    tolerance, relative = (0.1, 0.2) if kv_type == "q4_0" else (GPU_TOLERANCE, 0.0)
    tokens = np.random.default_rng(7).integers(0, 384, 5 * SHARED_CHUNK).tolist()
    sizes = [SHARED_CHUNK, 1, 1, SHARED_CHUNK, 1, 40, SHARED_CHUNK]
    for size in sizes:
        chunk = tokens[on_host.n_tokens : on_host.n_tokens + size]
        shared.eval(chunk)
        on_host.eval(chunk)
        seen = slice(on_host.n_tokens - size, on_host.n_tokens)
        if kv_type != "f16" and on_host.kv.compactions > 0:
            continue  # other kernels round quantised rows otherwise, and other rows may stay
        np.testing.assert_allclose(shared.scores[seen], on_host.scores[seen], atol=tolerance)
        for layer in range(N_LAYERS):
            (positions, scores), (expected_positions, expected) = (
                llm.kv_rows(layer) for llm in (shared, on_host)
            )
            np.testing.assert_array_equal(positions, expected_positions)
            np.testing.assert_allclose(scores, expected, atol=10 * tolerance, rtol=relative)
            assert np.abs(scores).sum() > 1
    assert shared.kv.compactions == on_host.kv.compactions > 0
    shared.close()
    on_host.close()


def refuse_split_heads(device: str, path: str) -> None:
    """A compaction chooses rows head by head: all heads of a layer have to be in one place."""
    with pytest.raises(UnsupportedModelError, match="split_mode = LLAMA_SPLIT_MODE_LAYER"):
        Llama(
            path,
            **devices(device),
            split_mode=llama_cpp.LLAMA_SPLIT_MODE_TENSOR,
            flash_attn=True,
            verbose=False,
        )


def refuse_device(device: str, path: str) -> None:
    """V lies transposed without flash attention, and is copied back when its rows have moved."""
    with pytest.raises(SettingsError, match="the device cannot move rows"):
        Llama(path, **devices(device), flash_attn=False, verbose=False)


if __name__ == "__main__":
    device, path, other, *settings = sys.argv[1:]
    compare = {
        "reference": compare_with_reference,
        "host": compare_with_host,
        "recall": compare_recall_with_host,
        "split": refuse_split_heads,
        "refused": refuse_device,
        "shared": compare_shared_layers,
    }[other]
    if device == MOCK:
        add_mock_device()
    compare(device, path, *settings)
