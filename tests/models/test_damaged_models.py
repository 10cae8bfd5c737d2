"""Headers that would abort llama.cpp are refused, and valid headers are accepted."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

import tiny_gguf
from gguf_image import ARRAY, FLOAT32, INT32, STRING, UINT16, UINT32, Image, Pair, read_image
from pyh2o.errors import ModelError
from pyh2o.models.damage import check_header
from pyh2o.models.gguf_file import files_of
from pyh2o.models.header import read_header
from reference_rows import last_logits
from research.eval.model import read_model
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def with_values(values: dict[str, Any], architecture: str = "llama") -> Callable[[Image], None]:
    """Return a change that replaces values of keys of the architecture."""
    kinds = {int: UINT32, float: FLOAT32, bytes: STRING, list: ARRAY}

    def change(image: Image) -> None:
        for name, value in values.items():
            key = f"{architecture}.{name}".encode()
            image.pairs = [each for each in image.pairs if each.key != key]
            image.pairs.append(Pair(key, kinds[type(value)], INT32, value))

    return change


def with_tokenizer(name: bytes) -> Callable[[Image], None]:
    """Return a change that names another tokenizer."""

    def change(image: Image) -> None:
        [pair] = [each for each in image.pairs if each.key == b"tokenizer.ggml.model"]
        pair.value = name

    return change


def with_type(name: str, kind: str) -> Callable[[Image], None]:
    """Return a change that gives a tensor another type and moves the following tensors."""

    def change(image: Image) -> None:
        end = 0
        for tensor in image.tensors:
            if tensor.name == f"{name}.weight".encode():
                tensor.kind = GGMLQuantizationType[kind]
            n_block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
            tensor.offset = end
            end += math.prod(tensor.shape) // n_block * n_bytes
            end += -end % 32
        image.data = image.data.ljust(end, b"\0")

    return change


DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"block_count": 0}, "block_count is 0"),
    ({"block_count": 513}, "block_count is 513"),
    ({"nextn_predict_layers": 4}, "nextn_predict_layers is 4"),
    ({"context_length": 2**32 - 1}, "context_length is 4294967295"),
    ({"attention.layer_norm_rms_epsilon": -1.0}, "attention.layer_norm_rms_epsilon is -1.0"),
    ({"attention.layer_norm_rms_epsilon": math.nan}, "attention.layer_norm_rms_epsilon is nan"),
    ({"rope.scaling.type": b"far"}, "rope.scaling.type is far"),
    ({"rope.dimension_count": 31}, "rope.dimension_count is 31"),
    ({"rope.dimension_count": 34}, "rope.dimension_count is 34"),
    ({"rope.dimension_sections": [8, 8, 8, 16]}, "rope.dimension_sections is 8, 8, 8, 16"),
    ({"attention.key_length": 16}, "rope.dimension_count is 32"),
    ({"expert_count": 1025, "expert_used_count": 1}, "expert_count is 1025"),
    ({"expert_used_count": 2}, "expert_used_count is 2"),
    ({"expert_count": 2}, "expert_used_count is missing"),
    ({"expert_count": 2, "expert_used_count": [1, 3, 1]}, "expert_used_count is 1, 3, 1"),
    ({"expert_group_count": 1}, "expert_group_count is 1"),
    ({**EXPERTS, "expert_group_count": 4}, "expert_group_count is 4"),
    ({**EXPERTS, "expert_group_count": 3, "expert_group_used_count": 1}, "expert_group_count is 3"),
    ({**EXPERTS, "expert_group_count": 2}, "expert_group_used_count is missing"),
]


@pytest.mark.parametrize(("values", "message"), DAMAGES)
def test_values_that_llama_cpp_asserts_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    check_refused(changed(tmp_path, with_values(values)), f"llama.{message}")


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("jamba", "ssm.inner_size", 320, "jamba.ssm.inner_size is 320"),
        ("mla", "attention.key_length_mla", 16, "deepseek2.rope.dimension_count is"),
    ],
)
def test_values_that_an_architecture_asserts_are_refused(
    tmp_path: Path, variant: str, key: str, value: int, message: str
) -> None:
    change = with_values({key: value}, message.partition(".")[0])
    check_refused(changed(tmp_path, change, arch_variant=variant), message)


def test_a_tokenizer_without_its_byte_tokens_is_refused(tmp_path: Path) -> None:
    check_refused(changed(tmp_path, with_tokenizer(b"bert")), "it has byte tokens")


@pytest.mark.parametrize("text", [b"the same", b"", b"[EMPTY_301]"])
def test_tokens_with_the_same_text_are_refused(tmp_path: Path, text: bytes) -> None:
    """llama.cpp names empty tokens by their ids."""

    def change(image: Image) -> None:
        [tokens] = [each for each in image.pairs if each.key == b"tokenizer.ggml.tokens"]
        tokens.value[300], tokens.value[301] = text, b"" if b"EMPTY" in text else text

    path = changed(tmp_path, change)
    if text:
        check_refused(path, "token 301 has the same text as an earlier token")
    else:
        with tiny_llama(path, hh=8, recent=8) as llm:
            assert llm.detokenize([301]) == b"[EMPTY_301]"


def test_tensors_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    """llama.cpp asserts their alignment, unless it copies them."""

    def change(image: Image) -> None:
        image.pairs.append(Pair(b"general.alignment", UINT32, 0, 8))
        image.alignment = 8
        image.pairs.append(Pair(b"any", STRING, 0, b""))
        while len(image.header()) % 32 == 0:
            image.pairs[-1].value += b" "

    with tiny_llama(changed(tmp_path, lambda image: None)) as llm:
        llm.eval([5, 6, 7])
        expected = last_logits(llm)
    path = changed(tmp_path, change)
    assert check_header(str(path)) == (False, {0})
    with tiny_llama(path) as llm:
        llm.eval([5, 6, 7])
        np.testing.assert_array_equal(last_logits(llm), expected)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("blk.0.attn_norm", "Q8_0", "its vector blk.0.attn_norm.weight is not of a floating"),
        ("blk.2.ffn_norm", "I8", "its vector blk.2.ffn_norm.weight is not of a floating"),
        ("blk.1.ffn_up", "I32", "its matrix blk.1.ffn_up.weight is not of a type for weights"),
        ("token_embd", "I32", "its matrix token_embd.weight is not of a type for weights"),
    ],
)
def test_a_tensor_of_a_wrong_type_is_refused(
    tmp_path: Path, name: str, kind: str, message: str
) -> None:
    check_refused(changed(tmp_path, with_type(name, kind)), message)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_vector_of_a_type_for_gpus_only_is_refused(tmp_path: Path, kind: str) -> None:
    path = changed(tmp_path, with_type("output_norm", kind))
    check_refused_by(tiny_llama, path, "its vector output_norm.weight is not in f32, which the CPU")
    check_header(str(path))


@pytest.mark.parametrize("length", [4, 30, 5000, -100_000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    content = path.read_bytes()
    path.write_bytes(content[:length])
    n_left = len(content) + length
    is_header = length > 0
    check_refused(
        path,
        "its header cannot be read"
        if is_header
        else f"it has {n_left:,} bytes of at least {len(content):,}",
    )


def test_a_part_without_a_number_is_refused(tmp_path: Path) -> None:
    """llama.cpp does not check the type of the number."""
    first = changed(
        tmp_path,
        lambda image: image.pairs.append(Pair(b"split.count", UINT16, 0, 2)),
        name="tiny-00001-of-00002.gguf",
    )
    (tmp_path / "tiny-00002-of-00002.gguf").write_bytes(first.read_bytes())
    check_refused(first, "tiny-00002-of-00002.gguf is damaged: it has no part number")


def in_files(path: Path, seed: int) -> list[Path]:
    """Write a valid model in several files."""
    writer = partial(GGUFWriter, split_max_tensors=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "GGUFWriter", writer)
        write_tiny_gguf(path, seed=seed)
    return sorted(path.parent.glob(f"{path.stem}-0*"))


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    first, second, *_ = in_files(tmp_path / "m.gguf", seed=1)
    tiny_llama(first).close()
    for use in (tiny_llama, read_header):
        with pytest.raises(ModelError, match="one of the 4 files of a model: give the first one"):
            use(second)
    second.rename(tmp_path / "other.gguf")
    for use in (tiny_llama, read_header):
        with pytest.raises(ModelError, match=f"{second.name} is not in the same folder: fetch"):
            use(first)


def test_parts_of_a_model_with_a_similar_name_are_not_used(tmp_path: Path) -> None:
    """The names of both models start and end alike."""
    first, *others = in_files(tmp_path / "m.gguf", seed=1)
    [*_, last] = in_files(tmp_path / "m-large.gguf", seed=2)
    last.write_bytes(last.read_bytes()[:300])
    assert files_of(first) == [first, *others]
    assert read_header(first).file_bytes == sum(path.stat().st_size for path in [first, *others])
    assert read_model(first).file_bytes == read_header(first).file_bytes


def test_text_functions_of_a_model_without_a_vocabulary_are_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, with_tokenizer(b"no_vocab"))
    with tiny_llama(path, hh=8, recent=8) as llm:
        llm.eval([5, 6, 7])
        with pytest.raises(ModelError, match="has no vocabulary"):
            llm.tokenize(b"text")
        with pytest.raises(ModelError, match="has no vocabulary"):
            llm.detokenize([5, 6, 7])


def test_a_missing_bos_token_is_reported(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, bpe=True)
    image = read_image(path)
    image.pairs = [
        each for each in image.pairs if not each.key.endswith((b"bos_token_id", b"bos_token"))
    ]
    for pair in image.pairs:
        if pair.key == b"tokenizer.ggml.model":
            pair.value = b"gemma4"
    image.pairs.append(Pair(b"tokenizer.ggml.add_bos_token", 7, 0, 1))
    path.write_bytes(image.header() + image.data)
    with tiny_llama(path, hh=8, recent=8) as llm:
        assert llm.tokenize(b"text", add_bos=False)
        with pytest.raises(ModelError, match="requires a BOS token"):
            llm.tokenize(b"text")


def test_a_long_context_needs_no_memory_for_tokens(tmp_path: Path) -> None:
    """llama_cpp allocates and clears 8 GiB for the tokens of a word."""
    path = changed(tmp_path, with_values({"context_length": 2**31 - 1}))
    with tiny_llama(path, n_ctx=64, hh=8, recent=8) as llm:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tokens = llm.tokenize(b"text")
        assert llm.detokenize(tokens) == b"text"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 1 << 20


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_valid_matrix_types_are_accepted(tmp_path: Path, name: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, dtype=GGMLQuantizationType[name])
    check_header(str(path), on_cpu=True)


def changed(
    folder: Path, change: Callable[[Image], object], *, name: str = "tiny.gguf", **kind: Any
) -> Path:
    """Write a tiny model with a changed header."""
    path = write_tiny_gguf(folder / name, seed=1, **kind)
    image = read_image(path)
    change(image)
    path.write_bytes(image.header() + image.data)
    return path


def check_refused(path: Path, message: str) -> None:
    """Check that a model is refused with a one-line error, wherever it is opened."""
    for use in (tiny_llama, read_header):
        check_refused_by(use, path, message)


def check_refused_by(use: Callable[[Path], object], path: Path, message: str) -> None:
    with pytest.raises(ModelError) as error:
        use(path)
    assert message in str(error.value)
    assert "is damaged" in str(error.value)
    assert "fetch it again" in str(error.value)
    assert "\n" not in str(error.value)
