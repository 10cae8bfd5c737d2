"""The header of a text's state: version, model and tokens.

llama.cpp and the cache check shapes and settings only, which two models of a family can share.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from mmap import mmap

import numpy as np

from ..cache.kv_cache import MISFIT, IntArray
from ..errors import StateError

VERSION = 3
_MAGIC = b"h2otext"
# The magic number of llama.cpp's states, with which states of version 1 started.
_MAGIC_1 = bytes.fromhex("d83c14af")
# Magic, version, `Model.rows_identity`, hash of the tokens.
_HEADER = struct.Struct("<7sB32s32s")
HEADER_BYTES = _HEADER.size
_TOKENS_AT = HEADER_BYTES - 32


def state_header(identity: bytes, tokens: Sequence[int] | IntArray) -> bytes:
    of_tokens = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).data).digest()
    return _HEADER.pack(_MAGIC, VERSION, identity, of_tokens)


def check_header(data: bytes | mmap, identity: bytes, tokens: Sequence[int] | IntArray) -> None:
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
    expected = state_header(identity, tokens)
    if header[:_TOKENS_AT] != expected[:_TOKENS_AT]:
        raise StateError(
            "the state is from another model, LoRA adapter or RoPE setting: load those that it was "
            "saved with"
        )
    if header != expected:
        raise StateError("the state is from another text: pass the tokens it was saved with")
