"""A parsed GGUF file: every number of its header can be replaced, validly or not."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFReader, ReaderField

STRING, ARRAY = 8, 9
UINT16, UINT32, INT32, FLOAT32 = 2, 4, 5, 6
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""struct's letter of each type of value that is a number."""

_ALIGNMENT = 32


@dataclass
class Pair:
    """A key and its value: a number, bytes, or a list of either; with GGUF's numbers of types."""

    key: bytes
    kind: int
    element: int
    value: Any


@dataclass
class Tensor:
    """A tensor's description; the shape's fastest dimension first, the offset from the data on."""

    name: bytes
    shape: list[int]
    kind: int
    offset: int


@dataclass
class Image:
    """A file; `more_pairs` and `more_tensors` are added to the header's counts."""

    data: bytes
    pairs: list[Pair] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    more_pairs: int = 0
    more_tensors: int = 0
    alignment: int = _ALIGNMENT

    def header(self) -> bytes:
        """Return the header, padded to the start of the data."""
        counts = (
            self.version,
            (len(self.tensors) + self.more_tensors) % 2**64,
            (len(self.pairs) + self.more_pairs) % 2**64,
        )
        parts = [b"GGUF", struct.pack("<IQQ", *counts)]
        for pair in self.pairs:
            parts += [_string(pair.key), struct.pack("<I", pair.kind % 2**32)]
            if pair.kind == ARRAY:
                parts.append(struct.pack("<IQ", pair.element % 2**32, len(pair.value)))
                parts += [_packed(pair.element, each) for each in pair.value]
            else:
                parts.append(_packed(pair.kind, pair.value))
        for tensor in self.tensors:
            shape = [size % 2**64 for size in tensor.shape]
            parts += [
                _string(tensor.name),
                struct.pack(f"<I{len(shape)}Q", len(shape), *shape),
                struct.pack("<IQ", tensor.kind % 2**32, tensor.offset % 2**64),
            ]
        content = b"".join(parts)
        return content + bytes(-len(content) % self.alignment)


def read_image(path: Path) -> Image:
    """Parse a valid file whose data has the usual alignment."""
    reader = GGUFReader(path)
    pairs = [_pair(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    tensors = [
        Tensor(
            each.name.encode(),
            each.shape.tolist(),
            int(each.tensor_type),
            each.data_offset - reader.data_offset,
        )
        for each in reader.tensors
    ]
    data = path.read_bytes()[reader.data_offset :]
    return Image(data, pairs, tensors, reader.fields["GGUF.version"].contents())


def _pair(field: ReaderField) -> Pair:
    kind, element = int(field.types[0]), int(field.types[-1]) if len(field.types) > 1 else 0
    values = [bytes(field.parts[i]) for i in field.data]
    if (element or kind) != STRING:
        letter = NUMBERS[element or kind]
        values = [struct.unpack(f"<{letter}", each)[0] for each in values]
    return Pair(field.name.encode(), kind, element, values if kind == ARRAY else values[0])


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _packed(kind: int, value: Any) -> bytes:
    """Encode a value, converted to its type if needed; bytes stay as they are.

    Integers that are too large lose their upper bits.
    """
    letter = NUMBERS.get(kind)
    if letter is None:
        return _string(value) if kind == STRING and isinstance(value, bytes) else bytes(8)
    if isinstance(value, (bytes, list)):
        value = len(value)
    if letter in "fd":
        return struct.pack(f"<{letter}", _float(value))
    if not math.isfinite(value):
        value = 0
    size = struct.calcsize(letter)
    return (int(value) % 2 ** (8 * size)).to_bytes(size, "little")


def _float(value: float) -> float:
    """Return a value that fits into 32 bits: what is too large becomes infinite."""
    return value if math.isnan(value) or abs(value) < 3e38 else math.copysign(math.inf, value)
