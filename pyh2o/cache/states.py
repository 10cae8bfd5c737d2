"""What the cache of a text holds, as bytes, and putting it back."""

from __future__ import annotations

import ctypes
from mmap import mmap
from typing import Any

import llama_cpp
import numpy as np

from ..errors import StateError

MISFIT = "the state does not fit: it is damaged, or of another model or other settings"


def written_state(context: Any, seq_id: int) -> mmap:
    """All that the KV cache of a sequence holds (see `Text.kv_state`)."""
    size = llama_cpp.llama_state_seq_get_size(context, seq_id)
    if size == 0:
        raise StateError("llama.cpp could not save the KV cache: verbose=True shows its log")
    try:
        data = mmap(-1, size)
    except OSError as error:
        raise MemoryError(f"no {size:,} bytes of memory for a state") from error
    target = (ctypes.c_uint8 * size).from_buffer(data)
    written = llama_cpp.llama_state_seq_get_data(context, target, size, seq_id)
    if written != size:
        raise StateError("llama.cpp could not save the KV cache: verbose=True shows its log")
    return data


def read_state(context: Any, seq_id: int, data: bytes | mmap, n_tokens: int) -> None:
    """Put back what `written_state` returned, of a text of so many tokens, into an empty sequence.

    Raises:
        StateError: it does not fit the model, its settings or the text.
    """
    source = np.frombuffer(data, np.uint8)
    pointer = source.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    read = llama_cpp.llama_state_seq_set_data(context, pointer, len(data), seq_id)
    newest = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(context), seq_id)
    if read != len(data) or newest != n_tokens - 1:
        raise StateError(MISFIT)
