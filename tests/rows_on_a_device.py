"""Compares a cache on an RPC device with the reference, in a process of its own.

Usage: rows_on_a_device.py ENDPOINT MODEL composed|flash POLICY
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from pyh2o._library import LIBRARY_FOLDER
from pyh2o.llama import KV_TYPES, Llama
from pyh2o.reference import ReferenceLlama

CHUNK = 7
N_POS = 64


def add_device(endpoint: str) -> None:
    """Make the server's device known to ggml."""
    rpc = ctypes.CDLL(str(LIBRARY_FOLDER / "libggml-rpc.so"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml = ctypes.CDLL(str(LIBRARY_FOLDER / "libggml.so"))
    ggml.ggml_backend_register(ctypes.c_void_p(rpc.ggml_backend_rpc_add_server(endpoint.encode())))


def main(endpoint: str, path: str, attention: str, policy: str) -> None:
    add_device(endpoint)
    reference = ReferenceLlama.from_gguf(
        path, heavy=12, recent=9, slack=CHUNK, n_pos=N_POS, policy=policy
    )
    llm = Llama(
        path,
        hh=12,
        recent=9,
        slack=CHUNK,
        policy=policy,
        n_gpu_layers=-1,
        type_k=KV_TYPES["f32"],
        type_v=KV_TYPES["f32"],
        flash_attn=attention == "flash",
        logits_all=True,
        n_threads=1,
        verbose=True,
    )
    tokens = np.random.default_rng(5).integers(0, 384, 45 * CHUNK)
    tolerance = 2e-2 if attention == "flash" else 1e-4
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK].tolist()
        expected = reference.eval(chunk)
        llm.eval(chunk)
        np.testing.assert_allclose(llm.scores[start : llm.n_tokens], expected, atol=tolerance)
        for layer in range(3):
            positions, _ = llm.kv_rows(layer)
            for head in range(2):
                np.testing.assert_array_equal(positions[head], reference.positions(layer, head))
    assert llm.kv.compactions == reference.n_compactions > 10
    assert llm.kv.rebases == reference.n_rebases > 4

    state, more = llm.kv_state(), tokens[:20].tolist()
    futures = []
    for _ in range(2):
        llm.load_kv_state(state, tokens)
        llm.eval(more)
        futures.append(llm.scores[len(tokens) : llm.n_tokens].copy())
    np.testing.assert_array_equal(*futures)
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
