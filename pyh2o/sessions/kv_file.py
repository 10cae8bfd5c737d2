"""The file of a text's KV cache, which saves reading the text again.

It has the tokens that are in the cache, the settings of the cache, its state from `Text.kv_state`,
and their CRC-32. It is only a cache: a file that is missing, damaged, or of another model or other
settings makes the text be read again.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

from ..core.model import Model
from ..core.text import Text
from ..errors import SessionError, StateError
from ..system.files import replacement
from .identity import difference, settings_identity
from .messages import packed, unpacked

_MAGIC = b"h2okv\0\0\1"
# Magic with the version, CRC-32 of the rest, number of tokens, bytes of the settings.
_HEADER = struct.Struct("<8sIII")


def write_kv(path: Path, text: Text) -> None:
    """Write the KV cache of a text to a file.

    Raises:
        SessionError: the file cannot be written; an old one is unchanged.
    """
    settings = json.dumps(settings_identity(text.model)).encode()
    tokens, state = packed(text.tokens), text.kv_state()
    crc = zlib.crc32(state, zlib.crc32(tokens, zlib.crc32(settings)))
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with replacement(path, prefix=f".{path.name}-", mode=0o600) as file:
            file.write(_HEADER.pack(_MAGIC, crc, len(tokens) // 4, len(settings)))
            for part in (settings, tokens, state):
                file.write(part)
    except OSError as error:
        raise SessionError(
            f"cannot save the KV cache to {path}: {error.strerror or error}; the text is saved, "
            "and will be read again"
        ) from error


def read_kv(path: Path, model: Model) -> tuple[list[int], bytes]:
    """Return the tokens in a file and their state.

    Raises:
        StateError: the file does not exist, is damaged, or from other settings.
    """
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        raise StateError("its KV cache was not saved") from None
    except OSError as error:
        raise StateError(f"its KV cache cannot be read: {error.strerror or error}") from None
    rest = data[_HEADER.size :]
    if len(data) < _HEADER.size:
        raise StateError("its KV cache is damaged")
    magic, crc, n_tokens, n_settings = _HEADER.unpack(data[: _HEADER.size])
    if magic != _MAGIC:
        raise StateError("its KV cache is from another version of pyh2o")
    if crc != zlib.crc32(rest):
        raise StateError("its KV cache is damaged")
    end = n_settings + 4 * n_tokens
    if reason := difference(json.loads(bytes(rest[:n_settings])), model):
        raise StateError(f"its KV cache was made {reason}")
    return unpacked(bytes(rest[n_settings:end])), bytes(rest[end:])
