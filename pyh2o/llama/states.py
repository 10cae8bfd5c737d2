"""What the cache of a model holds, as bytes, and putting it back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import llama_cpp

from ..cache.kv_cache import IntArray, check_state_version
from ..errors import StateError
from .arguments import StockLlama

if TYPE_CHECKING:
    from . import Llama

MISFIT = "the state does not fit: it is damaged, or of another model or other settings"


class EvictingState(llama_cpp.LlamaState):  # type: ignore[misc]  # llama_cpp is not typed
    """A state with the rows that eviction keeps, which has a format of its own."""


def kv_state(llm: Llama) -> bytes:
    """All that the KV cache of a model holds (see `Llama.kv_state`)."""
    # Ctrl-C can leave rows of tokens that are not in the record.
    if not llm._ctx.kv_cache_seq_rm(-1, llm.n_tokens, -1):
        raise StateError(
            "an evaluation was broken off, and rows were evicted for it: call reset() and "
            "evaluate the text again"
        )
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, llm.seq_id)
    data = (ctypes.c_uint8 * size)()
    written = llama_cpp.llama_state_seq_get_data(llm.ctx, data, size, llm.seq_id)
    if written != size:
        raise StateError("llama.cpp could not save the KV cache: verbose=True shows its log")
    return bytes(data)


def read_kv_state(llm: Llama, data: bytes, tokens: Sequence[int] | IntArray) -> None:
    """Put what `kv_state` returned into an empty cache.

    Raises:
        StateError: it does not fit the model, its settings or the tokens.
        StateVersionError: another version of pyh2o wrote it.
    """
    if llm.evicting:
        check_state_version(data)
    source = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    read = llama_cpp.llama_state_seq_set_data(llm.ctx, source, len(data), llm.seq_id)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    newest = llama_cpp.llama_memory_seq_pos_max(memory, llm.seq_id)
    if read != len(data) or newest != len(tokens) - 1:
        raise StateError(MISFIT)


def evicting_state(llm: Llama) -> EvictingState:
    """The parent's state, with all that eviction has to remember."""
    data = kv_state(llm)
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
    try:
        StockLlama.load_state(llm, state)
    except (RuntimeError, ValueError) as error:
        llm.input_ids = record
        llm.reset()
        raise StateError(MISFIT) from error
    llm.input_ids = record
    llm.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
