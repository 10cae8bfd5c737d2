"""A llama.cpp context with several sequences, without llama_cpp's classes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np

from pyh2o.cache.kv_cache import KVCache
from pyh2o.cache.native import attach
from pyh2o.cache.settings import Budget
from pyh2o.core.parameters import KV_TYPES

N_SEQ = 3


class Context:
    """A llama.cpp context with several sequences."""

    def __init__(
        self,
        path: Path,
        *,
        kv_unified: bool = False,
        flash_attention: bool = False,
        n_gpu_layers: int = -1,
    ) -> None:
        llama_cpp.llama_backend_init()
        self.flash_attention = flash_attention
        of_model = llama_cpp.llama_model_default_params()
        of_model.n_gpu_layers = n_gpu_layers
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), of_model)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 256 * N_SEQ
        params.n_batch = params.n_ubatch = 64
        params.n_seq_max = N_SEQ
        params.kv_unified = kv_unified
        params.type_k = params.type_v = KV_TYPES["f32"]
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.address = ctypes.cast(self.context, ctypes.c_void_p).value or 0
        self.of: list[KVCache] = []

    def attach(self, budget: Budget) -> None:
        """Enable eviction."""
        budget = attach(self.address, budget)
        self.of = [KVCache(self.address, seq_id, budget, evicting=True) for seq_id in range(N_SEQ)]

    def decode(self, chunks: dict[int, tuple[int, list[int]]]) -> int:
        """Decode {sequence: (position, tokens)} in one batch. Return llama_decode's status."""
        n_tokens = sum(len(tokens) for _, tokens in chunks.values())
        batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
        i = 0
        for seq_id, (first, tokens) in chunks.items():
            for k, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, first + k
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
                batch.logits[i] = k == len(tokens) - 1
                i += 1
        batch.n_tokens = n_tokens
        status = int(llama_cpp.llama_decode(self.context, batch))
        llama_cpp.llama_batch_free(batch)
        return status

    def copied(self, path: Path, budget: Budget) -> Context:
        """Return another context of the same model with the state of this one."""
        size = llama_cpp.llama_state_get_size(self.context)
        state = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_get_data(self.context, state, size) == size
        copied = Context(path, flash_attention=self.flash_attention)
        copied.attach(budget)
        assert llama_cpp.llama_state_set_data(copied.context, state, size) == size
        return copied

    def last_logits(self, output: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, output)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
