"""Compares a cache on a device with another, in a process of its own.

Usage: rows_on_a_device.py DEVICE MODEL reference composed|flash POLICY CHUNK
       rows_on_a_device.py DEVICE MODEL host KV_TYPE GPU_LAYERS composed|flash
       rows_on_a_device.py DEVICE MODEL recall KV_TYPE
       rows_on_a_device.py DEVICE MODEL split

DEVICE is the endpoint of an RPC server, or several with commas between them, or "gpu" for this
machine's own.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from oracle import assert_same_rows, read, rows_of
from pyh2o import Llama
from pyh2o.core.parameters import KV_TYPES
from pyh2o.errors import UnsupportedModelError
from research.reference import ReferenceLlama
from tiny_llama import EXACT_ROWS

# isort: split
import llama_cpp  # after pyh2o, whose library it then runs on

CHUNK = 7
N_POS = 64
N_TOKENS = 231
# A GPU computes with other kernels, which round differently.
GPU = "gpu"
GPU_TOLERANCE = 2e-2


def devices(device: str) -> dict[str, Any]:
    """Settings: all layers on the device."""
    return {"n_gpu_layers": -1} if device == GPU else {"rpc_servers": device}


def compare_with_reference(
    device: str, path: str, attention: str, policy: str, tokens_at_once: str
) -> None:
    reference = ReferenceLlama.from_gguf(
        path, heavy=12, recent=9, slack=CHUNK, n_pos=N_POS, policy=policy
    )
    llm = Llama(
        path,
        hh=12,
        recent=9,
        slack=CHUNK,
        policy=policy,
        recall=0,
        **devices(device),
        **EXACT_ROWS,
        flash_attn=attention == "flash",
        logits_all=True,
        n_threads=1,
        verbose=True,
    )
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
    assert llm.device_bytes > llm.kv.bytes_k + llm.kv.bytes_v + llm.kv.bytes_scores

    state, more = llm.kv_state(), tokens[:20].tolist()
    futures = []
    for _ in range(2):
        llm.load_kv_state(state, tokens)
        llm.eval(more)
        futures.append(llm.scores[len(tokens) : llm.n_tokens].copy())
    np.testing.assert_array_equal(*futures)
    llm.close()


def compare_with_host(
    device: str, path: str, kv_type: str, gpu_layers: str, attention: str
) -> None:
    """Moved rows are the same bytes; rotated ones are rounded twice, by two computations."""
    on_device, on_host = (
        Llama(
            path,
            hh=12,
            recent=9,
            recall=0,
            slack=CHUNK,
            **{**place, "n_gpu_layers": layers},
            type_k=KV_TYPES[kv_type],
            type_v=KV_TYPES[kv_type],
            flash_attn=attention == "flash",
            attention="ops",
            logits_all=True,
            n_threads=1,
            verbose=True,
        )
        for place, layers in ((devices(device), int(gpu_layers)), ({}, 0))
    )
    tokens = np.random.default_rng(6).integers(0, 384, 24 * CHUNK)
    for start in range(0, len(tokens), CHUNK):
        for llm in (on_device, on_host):
            llm.eval(tokens[start : start + CHUNK].tolist())
        seen = slice(start, on_host.n_tokens)
        if on_host.kv.rebases == 0 and device != GPU:
            np.testing.assert_array_equal(on_device.scores[seen], on_host.scores[seen])
        else:
            np.testing.assert_allclose(on_device.scores[seen], on_host.scores[seen], atol=0.1)
    assert on_device.kv.compactions == on_host.kv.compactions > 10
    assert on_device.kv.rebases == on_host.kv.rebases == 1
    on_device.close()
    on_host.close()


def compare_recall_with_host(device: str, path: str, kv_type: str) -> None:
    """The same rows are archived and found, before and after a re-base."""
    on_device, on_host = (
        Llama(
            path,
            hh=24,
            recent=16,
            slack=CHUNK,
            recall=20,
            recall_type="f32",
            n_ctx=64,
            **place,
            type_k=KV_TYPES[kv_type],
            type_v=KV_TYPES[kv_type],
            flash_attn=True,
            attention="ops",
            logits_all=True,
            n_threads=1,
            verbose=True,
        )
        for place in (devices(device), {})
    )
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


if __name__ == "__main__":
    device, path, other, *settings = sys.argv[1:]
    compare = {
        "reference": compare_with_reference,
        "host": compare_with_host,
        "recall": compare_recall_with_host,
        "split": refuse_split_heads,
    }[other]
    compare(device, path, *settings)
