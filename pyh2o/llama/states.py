"""What the cache of a model holds, as bytes, and putting it back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from mmap import mmap
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

from ..cache.kv_cache import IntArray
from ..errors import StateError
from .arguments import StockLlama

if TYPE_CHECKING:
    from . import Llama

MISFIT = "the state does not fit: it is damaged, or of another model or other settings"


class EvictingState(llama_cpp.LlamaState):  # type: ignore[misc]  # llama_cpp is not typed
    """A state with the rows that eviction keeps, which has a format of its own."""


def mapped_kv_state(llm: Llama) -> mmap:
    """All that the KV cache of a model holds (see `Llama.mapped_kv_state`)."""
    # Ctrl-C can leave rows of tokens that are not in the record.
    if not llm._ctx.kv_cache_seq_rm(-1, llm.n_tokens, -1):
        raise StateError(
            "an evaluation was broken off, and rows were evicted for it: call reset() and "
            "evaluate the text again"
        )
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, llm.seq_id)
    if size == 0:
        raise StateError("llama.cpp could not save the KV cache: verbose=True shows its log")
    try:
        data = mmap(-1, size)
    except OSError as error:
        raise MemoryError(f"no {size:,} bytes of memory for a state") from error
    target = (ctypes.c_uint8 * size).from_buffer(data)
    written = llama_cpp.llama_state_seq_get_data(llm.ctx, target, size, llm.seq_id)
    if written != size:
        raise StateError("llama.cpp could not save the KV cache: verbose=True shows its log")
    return data


def read_kv_state(llm: Llama, data: bytes | mmap, tokens: Sequence[int] | IntArray) -> None:
    """Put what `kv_state` returned into an empty cache.

    Raises:
        StateError: it does not fit the model, its settings or the tokens.
    """
    source = np.frombuffer(data, np.uint8)
    pointer = source.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    read = llama_cpp.llama_state_seq_set_data(llm.ctx, pointer, len(data), llm.seq_id)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    newest = llama_cpp.llama_memory_seq_pos_max(memory, llm.seq_id)
    if read != len(data) or newest != len(tokens) - 1:
        raise StateError(MISFIT)


def evicting_state(llm: Llama) -> EvictingState:
    """The parent's state, with all that eviction has to remember."""
    data = mapped_kv_state(llm)[:]
    n_logits = llm.n_tokens if llm._logits_all else 0
    return EvictingState(
        input_ids=llm._input_ids.copy(),
        scores=llm.scores[:n_logits].copy(),
        n_tokens=llm.n_tokens,
        llama_state=data,
        llama_state_size=len(data),
        seed=llm._seed,
    )


def load_full_state(llm: Llama, state: llama_cpp.LlamaState) -> None:
    """Load a state of the parent, which takes over its record; that may be shorter than this one.

    Raises:
        StateError: it does not fit.
    """
    record = llm.input_ids
    llm._grow_scores(state.n_tokens)
    try:
        StockLlama.load_state(llm, state)
    except (RuntimeError, ValueError) as error:
        llm.input_ids = record
        llm.reset()
        raise StateError(MISFIT) from error
    llm.input_ids = record
    llm.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
