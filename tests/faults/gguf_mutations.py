"""What is done to the headers of GGUF files: values, types, keys, tensors, counts and bytes."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable

from gguf_image import ARRAY, FLOAT32, INT32, NUMBERS, STRING, UINT32, Image, Pair

INTEGERS = (0, 1, 2, 3, 5, 7, 31, 33, 255, 513, 1 << 16, 1 << 20, 2**31 - 1, 2**31, 2**32 - 1, -1)
SIZES = (*INTEGERS, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, 0.5, float("nan"), float("inf"), float("-inf"))
WORDS = (b"", b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"none", b"no_vocab", b"plamo2", b"yarn")
WORDS += (b"longrope", b"mamba", b"gemma3", b"clip", b"\xff\xfe", b"\x00", b"x" * 300, b"qwen2")
# Sizes of ggml's types with blocks: elements and bytes.
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 30: (1, 2)}
_MOST_DATA = 1 << 22

Mutation = Callable[[Image, random.Random], None]


def mutated(image: Image, rng: random.Random) -> tuple[bytes, str]:
    """A file with one to three things wrong.

    Returns:
        Its content, and the names of the mutations.
    """
    image = copy.deepcopy(image)
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutation = rng.choice(MUTATIONS)
        mutation(image, rng)
        names.append(mutation.__name__)
    content = image.header() + image.data
    n_header = len(content) - len(image.data)
    if rng.random() < 0.15:
        mutation_of_bytes = rng.choice((cut, random_bytes, wild_length))
        content = mutation_of_bytes(content, n_header, rng)
        names.append(mutation_of_bytes.__name__)
    return content, ", ".join(names)


# Values


def integer(image: Image, rng: random.Random) -> None:
    """Another value for a number that is whole, with its own type."""
    pairs = [each for each in image.pairs if each.kind in NUMBERS and isinstance(each.value, int)]
    if pairs:
        pair = rng.choice(pairs)
        near = [pair.value - 1, pair.value + 1, pair.value * 2, pair.value // 2]
        pair.value = rng.choice([*INTEGERS, *near])


def floating(image: Image, rng: random.Random) -> None:
    """Another value for a number that is not."""
    pairs = [each for each in image.pairs if isinstance(each.value, float)]
    if pairs:
        rng.choice(pairs).value = rng.choice(FLOATS)


def word(image: Image, rng: random.Random) -> None:
    """Another text."""
    pairs = [each for each in image.pairs if each.kind == STRING]
    if pairs:
        rng.choice(pairs).value = rng.choice((*WORDS, rng.randbytes(rng.randrange(9))))


def kind(image: Image, rng: random.Random) -> None:
    """The same value as another type."""
    pair = rng.choice(image.pairs)
    pair.kind = rng.choice((*NUMBERS, STRING, 13, -1)) if pair.kind != ARRAY else pair.kind
    if pair.kind == ARRAY:
        pair.element = rng.choice((*NUMBERS, STRING, ARRAY, 13))
    elif pair.kind == STRING and not isinstance(pair.value, bytes):
        pair.value = str(pair.value).encode()


def array_length(image: Image, rng: random.Random) -> None:
    """An array that is shorter or longer."""
    arrays = [each for each in image.pairs if each.kind == ARRAY]
    if arrays:
        pair = rng.choice(arrays)
        n = rng.choice((0, 1, len(pair.value) // 2, len(pair.value) - 1, len(pair.value) + 1, 600))
        filling = pair.value[-1:] or [0]
        pair.value = (pair.value + filling * 600)[: max(n, 0)]


def array_element(image: Image, rng: random.Random) -> None:
    """An array with another element, or one of them twice."""
    arrays = [each for each in image.pairs if each.kind == ARRAY and each.value]
    if arrays:
        values = rng.choice(arrays).value
        i = rng.randrange(len(values))
        others: tuple[object, ...] = (rng.choice(values),)
        if isinstance(values[i], bytes):
            others += (*WORDS, rng.randbytes(4))
        else:
            others += FLOATS if isinstance(values[i], float) else INTEGERS
        values[i] = rng.choice(others)


def scalar_as_array(image: Image, rng: random.Random) -> None:
    """A value for each layer in the place of one for all, or the other way round."""
    pair = rng.choice(image.pairs)
    if pair.kind == ARRAY:
        pair.kind, pair.value = pair.element, (pair.value or [0])[0]
    else:
        n = rng.choice((0, 1, 2, 3, 4, 513))
        pair.kind, pair.element, pair.value = ARRAY, pair.kind, [pair.value] * n


# Keys


def dropped_key(image: Image, rng: random.Random) -> None:
    """A key less."""
    if len(image.pairs) > 1:
        image.pairs.remove(rng.choice(image.pairs))


def doubled_key(image: Image, rng: random.Random) -> None:
    """A key twice."""
    image.pairs.append(copy.deepcopy(rng.choice(image.pairs)))


def renamed_key(image: Image, rng: random.Random) -> None:
    """A key by the name of another, or by none."""
    rng.choice(image.pairs).key = rng.choice((*WORDS, rng.choice(image.pairs).key))


def known_key(image: Image, rng: random.Random) -> None:
    """A key that llama.cpp looks for and that was not there."""
    texts = [each.value for each in image.pairs if isinstance(each.value, bytes)]
    name, element = rng.choice(_KNOWN_KEYS)
    key = name.replace(
        b"ARCH", texts[0] if texts else b"llama"
    )  # the writer begins with the architecture
    value = rng.choice({STRING: WORDS, FLOAT32: FLOATS}.get(element, INTEGERS))
    pair = Pair(key, element, 0, value)
    if rng.random() < 0.2:
        pair.kind, pair.element, pair.value = ARRAY, element, [value] * rng.randrange(5)
    image.pairs = [each for each in image.pairs if each.key != key]
    image.pairs.append(pair)


_KNOWN_KEYS = (
    (b"general.alignment", UINT32),
    (b"split.count", 2),
    (b"ARCH.nextn_predict_layers", UINT32),
    (b"ARCH.expert_count", UINT32),
    (b"ARCH.expert_used_count", UINT32),
    (b"ARCH.expert_group_count", UINT32),
    (b"ARCH.expert_group_used_count", UINT32),
    (b"ARCH.rope.scaling.type", STRING),
    (b"ARCH.rope.scaling.factor", FLOAT32),
    (b"ARCH.rope.dimension_count", UINT32),
    (b"ARCH.rope.dimension_sections", INT32),
    (b"ARCH.rope.freq_base", FLOAT32),
    (b"ARCH.attention.key_length", UINT32),
    (b"ARCH.attention.value_length", UINT32),
    (b"ARCH.attention.head_count_kv", UINT32),
    (b"ARCH.attention.sliding_window", UINT32),
    (b"ARCH.attention.sliding_window_pattern", UINT32),
    (b"ARCH.attention.shared_kv_layers", UINT32),
    (b"ARCH.attention.causal", 7),
    (b"ARCH.pooling_type", UINT32),
    (b"ARCH.vocab_size", UINT32),
    (b"ARCH.embedding_length_out", UINT32),
    (b"ARCH.leading_dense_block_count", UINT32),
    (b"tokenizer.ggml.eos_token_id", UINT32),
    (b"tokenizer.ggml.eot_token_id", UINT32),
    (b"tokenizer.ggml.padding_token_id", UINT32),
    (b"tokenizer.ggml.add_bos_token", 7),
    (b"tokenizer.ggml.add_space_prefix", 7),
    (b"tokenizer.ggml.precompiled_charsmap", 0),
    (b"tokenizer.chat_template", STRING),
)


# Tensors


def tensor_shape(image: Image, rng: random.Random) -> None:
    """A tensor of another shape."""
    shape = rng.choice(image.tensors).shape
    i = rng.randrange(len(shape) or 1)
    if shape and rng.random() < 0.6:
        near = [shape[i] - 1, shape[i] + 1, shape[i] * 2, shape[i] // 2, shape[i] + 32]
        shape[i] = rng.choice([*SIZES, *near, *near])
    elif rng.random() < 0.5:
        shape.reverse()
    else:
        shape.insert(i, rng.choice((0, 1, 2)))
    packed_again(image, rng)


def tensor_dimensions(image: Image, rng: random.Random) -> None:
    """A tensor with fewer dimensions or too many."""
    tensor = rng.choice(image.tensors)
    tensor.shape = (tensor.shape * 3)[: rng.randrange(7)]
    packed_again(image, rng)


def tensor_kind(image: Image, rng: random.Random) -> None:
    """A tensor of another type."""
    rng.choice(image.tensors).kind = rng.choice((*range(-1, 45), *_BLOCKS, *_BLOCKS, 2**31 - 1))
    packed_again(image, rng)


def tensor_offset(image: Image, rng: random.Random) -> None:
    """A tensor somewhere else."""
    tensor = rng.choice(image.tensors)
    tensor.offset = rng.choice((*SIZES, tensor.offset + 32, tensor.offset - 32, tensor.offset + 1))


def tensor_name(image: Image, rng: random.Random) -> None:
    """A tensor by the name of another, or by none that is known."""
    one, other = rng.choice(image.tensors), rng.choice(image.tensors)
    if rng.random() < 0.4:
        one.name, other.name = other.name, one.name
    else:
        one.name = rng.choice((b"", b"x" * 70, other.name, rng.randbytes(5), one.name + b"x"))


def tensor_dropped(image: Image, rng: random.Random) -> None:
    """A tensor less."""
    if len(image.tensors) > 1:
        image.tensors.remove(rng.choice(image.tensors))
        packed_again(image, rng)


def tensor_doubled(image: Image, rng: random.Random) -> None:
    """A tensor more: by the same name, or as that of another layer."""
    tensor = copy.deepcopy(rng.choice(image.tensors))
    if rng.random() < 0.7:
        tensor.name = tensor.name.replace(b".0.", b".7.").replace(b".weight", b".bias")
    image.tensors.append(tensor)
    packed_again(image, rng)


def packed_again(image: Image, rng: random.Random) -> None:
    """Mostly: put the tensors one behind the other, and let the data be long enough."""
    end = 0
    if rng.random() < 0.2:
        return
    for tensor in image.tensors:
        n_block, n_bytes = _BLOCKS.get(tensor.kind, (256, 210))
        size = n_bytes
        for each in tensor.shape:
            size *= each
        tensor.offset = end
        end += size // n_block + -(size // n_block) % 32
    if len(image.data) < end < _MOST_DATA:
        image.data += rng.randbytes(64) * ((end - len(image.data)) // 64 + 1)


# The header as a whole


def counts(image: Image, rng: random.Random) -> None:
    """More or fewer keys or tensors than the header says."""
    n = rng.choice((-1, 1, 2, 1 << 20, 2**40, 2**63 - 1, 2**63))
    if rng.random() < 0.5:
        image.more_pairs = n
    else:
        image.more_tensors = n


def version(image: Image, rng: random.Random) -> None:
    """Another version of the format."""
    image.version = rng.choice((0, 1, 2, 4, 1 << 24, 3 << 24, 2**32 - 1))


def cut(content: bytes, n_header: int, rng: random.Random) -> bytes:
    """The file ends early."""
    return content[: rng.randrange(4, n_header if rng.random() < 0.5 else len(content))]


def random_bytes(content: bytes, n_header: int, rng: random.Random) -> bytes:
    """Some bytes of the header are others."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(4, n_header)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return bytes(changed)


def wild_length(content: bytes, n_header: int, rng: random.Random) -> bytes:
    """Eight bytes somewhere in the header are a length that cannot be."""
    at = rng.randrange(4, n_header - 8)
    return content[:at] + struct.pack("<Q", rng.choice(SIZES) % 2**64) + content[at + 8 :]


MUTATIONS: tuple[Mutation, ...] = (
    *(integer, integer, integer, floating, word, kind),
    *(array_length, array_element, scalar_as_array),
    *(dropped_key, doubled_key, renamed_key, known_key, known_key),
    *(tensor_shape, tensor_shape, tensor_dimensions, tensor_kind, tensor_offset),
    *(tensor_name, tensor_dropped, tensor_doubled, counts, version),
)
