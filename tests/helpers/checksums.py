"""The checksum of saved states."""

from __future__ import annotations

import struct

MASK = 2**64 - 1


def checksum(data: bytes) -> bytes:
    """Return the native checksum: of padded words of the bytes, and of their number."""
    value = 0xCBF29CE484222325
    whole = len(data) // 8 * 8
    rest = int.from_bytes(data[whole:], "little")
    for word in (*struct.unpack(f"<{whole // 8}Q", data[:whole]), rest, len(data)):
        value = (value ^ word) * 0x9E3779B97F4A7C15 & MASK
        value ^= value >> 32
    return value.to_bytes(8, "little")
