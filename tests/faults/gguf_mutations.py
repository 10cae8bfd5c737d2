"""Mutations of the headers of GGUF files: values, types, keys, tensors, counts and bytes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from gguf_image import ARRAY, FLOAT32, INT32, NUMBERS, STRING, UINT32, Image, Pair
from mutations import KINDS, Edit

INTEGERS = (0, 1, 2, 3, 5, 7, 31, 33, 255, 513, 1 << 16, 1 << 20, 2**31 - 1, 2**31, 2**32 - 1, -1)
SIZES = (*INTEGERS, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, 0.5, float("nan"), float("inf"), float("-inf"))
WORDS = (b"", b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"none", b"no_vocab", b"plamo2", b"yarn")
WORDS += (b"longrope", b"mamba", b"gemma3", b"clip", b"\xff\xfe", b"\x00", b"x" * 300, b"qwen2")
# Elements and bytes of a block of ggml's types.
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 30: (1, 2)}
_MOST_DATA = 1 << 22


def mutated(image: Image, rng: random.Random) -> tuple[bytes, str]:
    """Return a file with one to three mutations, and their names."""
    image = copy.deepcopy(image)
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutation = rng.choice(MUTATIONS)
        mutation(image, rng)
        names.append(mutation.__name__)
    header = image.header()
    if rng.random() < 0.15:
        edit = Edit(rng.choice(KINDS), rng.randrange(4, len(header)), 8, rng.randrange(2**20))
        header = edit.of(header, image.data)
        names.append(edit.kind)
    return header + image.data, ", ".join(names)


# Keys and values


def value(image: Image, rng: random.Random) -> None:
    """Change a number or text, also in an array."""
    pair = rng.choice(image.pairs)
    if pair.kind != ARRAY:
        pair.value = rng.choice(_others(pair.value))
    elif pair.value:
        i = rng.randrange(len(pair.value))
        pair.value[i] = rng.choice((*_others(pair.value[i]), rng.choice(pair.value)))


def _others(value: Any) -> Sequence[Any]:
    if isinstance(value, bytes):
        return WORDS
    if isinstance(value, float):
        return FLOATS
    return [*INTEGERS, value - 1, value + 1, value * 2, value // 2]


def kind(image: Image, rng: random.Random) -> None:
    """Change the type of a value."""
    pair = rng.choice(image.pairs)
    if pair.kind == ARRAY:
        pair.element = rng.choice((*NUMBERS, STRING, ARRAY, 13))
        return
    pair.kind = rng.choice((*NUMBERS, STRING, 13, -1))
    if pair.kind == STRING and not isinstance(pair.value, bytes):
        pair.value = str(pair.value).encode()


def array(image: Image, rng: random.Random) -> None:
    """Change the length of an array, or turn a value into an array or back."""
    pair = rng.choice(image.pairs)
    if pair.kind != ARRAY:
        n = rng.choice((0, 1, 2, 3, 4, 513))
        pair.kind, pair.element, pair.value = ARRAY, pair.kind, [pair.value] * n
    elif rng.random() < 0.3:
        pair.kind, pair.value = pair.element, (pair.value or [0])[0]
    else:
        n = rng.choice((0, 1, len(pair.value) // 2, len(pair.value) - 1, len(pair.value) + 1, 600))
        pair.value = (pair.value + (pair.value[-1:] or [0]) * 600)[: max(n, 0)]


def known_key(image: Image, rng: random.Random) -> None:
    """Add a key that llama.cpp reads."""
    texts = [each.value for each in image.pairs if isinstance(each.value, bytes)]
    name, element = rng.choice(_KNOWN_KEYS)
    # the writer begins with the architecture
    key = name.replace(b"ARCH", texts[0] if texts else b"llama")
    given = rng.choice({STRING: WORDS, FLOAT32: FLOATS}.get(element, INTEGERS))
    pair = Pair(key, element, 0, given)
    if rng.random() < 0.2:
        pair.kind, pair.element, pair.value = ARRAY, element, [given] * rng.randrange(5)
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

# Keys or tensors


def dropped(image: Image, rng: random.Random) -> None:
    """Remove a key or tensor."""
    items: list[Any] = rng.choice((image.pairs, image.tensors))
    if len(items) > 1:
        items.remove(rng.choice(items))
        packed_again(image, rng)


def doubled(image: Image, rng: random.Random) -> None:
    """Repeat a key or tensor, also as a tensor of another layer."""
    items: list[Any] = rng.choice((image.pairs, image.tensors))
    item = copy.deepcopy(rng.choice(items))
    if items is image.tensors and rng.random() < 0.7:
        item.name = item.name.replace(b".0.", b".7.").replace(b".weight", b".bias")
    items.append(item)
    packed_again(image, rng)


def renamed(image: Image, rng: random.Random) -> None:
    """Exchange two names, or use an unknown one."""
    if rng.random() < 0.4:
        rng.choice(image.pairs).key = rng.choice((*WORDS, rng.choice(image.pairs).key))
        return
    one, other = rng.choice(image.tensors), rng.choice(image.tensors)
    one.name, other.name = rng.choice(((other.name, one.name), (b"x" * 70, b""), (b"x", one.name)))


# Tensors


def shape(image: Image, rng: random.Random) -> None:
    """Change a tensor's sizes, their order or their number."""
    tensor = rng.choice(image.tensors)
    sizes, i = tensor.shape, rng.randrange(len(tensor.shape) or 1)
    if sizes and rng.random() < 0.6:
        near = [sizes[i] - 1, sizes[i] + 1, sizes[i] * 2, sizes[i] // 2, sizes[i] + 32]
        sizes[i] = rng.choice([*SIZES, *near, *near])
    else:
        more = [*sizes[:i], rng.choice((0, 1, 2)), *sizes[i:]]
        tensor.shape = rng.choice((sizes[::-1], more, (sizes * 3)[: rng.randrange(7)]))
    packed_again(image, rng)


def tensor_kind(image: Image, rng: random.Random) -> None:
    """Change the type of a tensor."""
    rng.choice(image.tensors).kind = rng.choice((*range(-1, 45), *_BLOCKS, *_BLOCKS, 2**31 - 1))
    packed_again(image, rng)


def offset(image: Image, rng: random.Random) -> None:
    """Change the offset of a tensor."""
    tensor = rng.choice(image.tensors)
    tensor.offset = rng.choice((*SIZES, tensor.offset + 32, tensor.offset - 32, tensor.offset + 1))


def packed_again(image: Image, rng: random.Random) -> None:
    """In 4 of 5 cases make the offsets consecutive and the data long enough."""
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
    """Change the number of keys or tensors, or the format version."""
    n = rng.choice((-1, 1, 2, 1 << 20, 2**40, 2**63 - 1, 2**63))
    name = rng.choice(("more_pairs", "more_tensors", "version"))
    setattr(image, name, n % 2**32 if name == "version" else n)


MUTATIONS: tuple[Callable[[Image, random.Random], None], ...] = (
    *(value, value, value, value, value, kind, array, array, known_key, known_key, known_key),
    *(dropped, doubled, renamed, renamed, shape, shape, shape, tensor_kind, offset, counts, counts),
)
