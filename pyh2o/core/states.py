"""The header of a text's state: version, model and tokens.

llama.cpp and the cache check shapes and settings only, which two models of a family can share.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from mmap import mmap
from typing import TYPE_CHECKING

import numpy as np

from ..cache.kv_cache import MISFIT, IntArray
from ..errors import StateError
from .parameters import ROPE_NAMES

if TYPE_CHECKING:
    from .model import Model

VERSION = 3
_MAGIC = b"h2otext"
# The magic number of llama.cpp's states, with which states of version 1 started.
_MAGIC_1 = bytes.fromhex("d83c14af")
# Magic, version, hash from `rows_identity`, hash of the tokens.
_HEADER = struct.Struct("<7sB32s32s")
HEADER_BYTES = _HEADER.size
_TOKENS_AT = HEADER_BYTES - 32


def rows_identity(model: Model) -> bytes:
    """Return a hash of everything that rows depend on, except tokens and cache settings."""
    file, lora, params = model.file, model.lora_file, model.context_params
    adapter = lora and [lora.bytes, lora.sha256, model.parameters.lora_scale]
    rope = [getattr(params, name) for name in ROPE_NAMES]
    about = [file.bytes, file.sha256, adapter, rope, model.parameters.kv_overrides]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()


def state_header(model: Model, tokens: Sequence[int] | IntArray) -> bytes:
    """Return the header of the state of a text with these tokens."""
    of_tokens = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).data).digest()
    return _HEADER.pack(_MAGIC, VERSION, model.rows_identity, of_tokens)


def check_header(data: bytes | mmap, model: Model, tokens: Sequence[int] | IntArray) -> None:
    """Raise a StateError if a state is from another version, model or text."""
    header = bytes(data[:HEADER_BYTES])
    if header.startswith(_MAGIC_1):
        version = 1
    elif header.startswith(_MAGIC) and len(header) == HEADER_BYTES:
        version = header[len(_MAGIC)]
    else:
        raise StateError(MISFIT)
    if version != VERSION:
        raise StateError(
            f"the state has version {version}, but this pyh2o reads version {VERSION}: evaluate "
            "the text again"
        )
    expected = state_header(model, tokens)
    if header[:_TOKENS_AT] != expected[:_TOKENS_AT]:
        raise StateError(
            "the state is from another model, LoRA adapter or RoPE setting: load those that it was "
            "saved with"
        )
    if header != expected:
        raise StateError("the state is from another text: pass the tokens it was saved with")
