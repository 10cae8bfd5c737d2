"""Headers that llama.cpp would end the process for are refused, and no others are."""

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
from tiny_gguf import ALL_VARIANTS, write_tiny_gguf
from tiny_llama import tiny_llama

EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def with_values(values: dict[str, Any], kind: int = UINT32) -> Callable[[Image], None]:
    """A change: keys of the architecture get other values."""

    def change(image: Image) -> None:
        for name, value in values.items():
            key = b"llama." + name.encode()
            image.pairs = [each for each in image.pairs if each.key != key]
            image.pairs.append(Pair(key, kind, 0, value))

    return change


def with_type(name: bytes, kind: GGMLQuantizationType) -> Callable[[Image], None]:
    """A change: a tensor gets another type, and the others their places behind it."""

    def change(image: Image) -> None:
        end = 0
        for tensor in image.tensors:
            if tensor.name == name:
                tensor.kind = kind
            n_block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
            tensor.offset = end
            end += math.prod(tensor.shape) // n_block * n_bytes
            end += -end % 32
        image.data = image.data.ljust(end, b"\0")

    return change


DAMAGES: dict[str, tuple[Callable[[Image], None], str]] = {
    "no layers": (with_values({"block_count": 0}), "it has 0 layers, not 1 to 512"),
    "many layers": (with_values({"block_count": 513}), "it has 513 layers"),
    "further tokens": (with_values({"nextn_predict_layers": 4}), "4 of its 3 layers predict"),
    "endless": (with_values({"context_length": 2**32 - 1}), "trained on texts of 4294967295"),
    "epsilon": (
        with_values({"attention.layer_norm_rms_epsilon": -1.0}, FLOAT32),
        "its layer_norm_rms_epsilon is -1.0",
    ),
    "no epsilon": (
        with_values({"attention.layer_norm_rms_epsilon": float("nan")}, FLOAT32),
        "its layer_norm_rms_epsilon is nan",
    ),
    "scaling": (with_values({"rope.scaling.type": b"far"}, STRING), "scales positions by 'far'"),
    "odd rotation": (with_values({"rope.dimension_count": 31}), "rotates 31 of the 32 elements"),
    "large rotation": (with_values({"rope.dimension_count": 34}), "rotates 34 of the 32 elements"),
    "key length": (with_values({"attention.key_length": 16}), "rotates 32 of the 16 elements"),
    "many experts": (
        with_values({"expert_count": 1025, "expert_used_count": 1}),
        "a token takes 1 of its 1025 experts",
    ),
    "no experts": (with_values({"expert_used_count": 2}), "a token takes 2 of its 0 experts"),
    "unused experts": (with_values({"expert_count": 2}), "a token takes 0 of its 2 experts"),
    "many groups": (with_values({**EXPERTS, "expert_group_count": 4}), "of 0 of 4 groups"),
    "groups of nothing": (with_values({"expert_group_count": 1}), "of 0 of 1 groups"),
    "unequal groups": (
        with_values({**EXPERTS, "expert_group_count": 3, "expert_group_used_count": 1}),
        "of 1 of 3 groups",
    ),
    "unused groups": (with_values({**EXPERTS, "expert_group_count": 2}), "of 0 of 2 groups"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_number_that_llama_cpp_asserts(tmp_path: Path, name: str) -> None:
    change, message = DAMAGES[name]
    refused(changed(tmp_path, change), message)


def test_experts_used_by_each_layer(tmp_path: Path) -> None:
    def change(image: Image) -> None:
        with_values({"expert_count": 2})(image)
        image.pairs.append(Pair(b"llama.expert_used_count", ARRAY, INT32, [1, 3, 1]))

    refused(changed(tmp_path, change), "a token takes 3 of its 2 experts")


def test_sections_of_a_rotation(tmp_path: Path) -> None:
    def change(image: Image) -> None:
        key = b"llama.rope.dimension_sections"
        image.pairs.append(Pair(key, ARRAY, INT32, [8, 8, 8, 16]))

    refused(changed(tmp_path, change), "rotates 40 of the 32 elements")


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        (
            "jamba",
            b"jamba.ssm.inner_size",
            320,
            "its recurrent layers have 320 elements, not twice the 128 of a token",
        ),
        (
            "mla",
            b"deepseek2.attention.key_length_mla",
            16,
            "it rotates 16 of the ",
        ),
    ],
)
def test_sizes_that_an_architecture_does_not_have(
    tmp_path: Path, variant: str, key: bytes, value: int, message: str
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, arch_variant=variant)
    image = read_image(path)
    [pair] = [each for each in image.pairs if each.key == key]
    pair.value = value
    path.write_bytes(image.header() + image.data)
    refused(path, message)


def test_tokens_for_bytes_in_a_tokenizer_that_has_none(tmp_path: Path) -> None:
    def change(image: Image) -> None:
        [pair] = [each for each in image.pairs if each.key == b"tokenizer.ggml.model"]
        pair.value = b"bert"

    refused(changed(tmp_path, change), "it has tokens for bytes")


@pytest.mark.parametrize("text", [b"the same", b"", b"[EMPTY_301]"])
def test_tokens_with_the_same_text(tmp_path: Path, text: bytes) -> None:
    """Two without any are no harm: llama.cpp names them by their numbers."""

    def change(image: Image) -> None:
        [tokens] = [each for each in image.pairs if each.key == b"tokenizer.ggml.tokens"]
        tokens.value[300], tokens.value[301] = text, b"" if b"EMPTY" in text else text

    path = changed(tmp_path, change)
    if text:
        refused(path, "its token 301 has the text of an earlier one")
    else:
        with tiny_llama(path, hh=8, recent=8) as llm:
            assert llm.detokenize([301]) == b"[EMPTY_301]"


@pytest.mark.parametrize("alignment", [1, 8, 16])
def test_tensors_that_cannot_be_mapped(tmp_path: Path, alignment: int) -> None:
    """llama.cpp asserts where they begin, unless it copies them into memory of its own."""

    def change(image: Image) -> None:
        image.pairs.append(Pair(b"general.alignment", UINT32, 0, alignment))
        image.alignment = alignment
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
        (b"blk.0.attn_norm.weight", GGMLQuantizationType.Q8_0, "its vector blk.0.attn_norm.weight"),
        (b"blk.2.ffn_norm.weight", GGMLQuantizationType.I8, "its vector blk.2.ffn_norm.weight"),
        (b"blk.1.ffn_up.weight", GGMLQuantizationType.I32, "its matrix blk.1.ffn_up.weight"),
        (b"token_embd.weight", GGMLQuantizationType.I32, "its matrix token_embd.weight"),
    ],
)
def test_tensor_of_a_type_for_other_things(
    tmp_path: Path, name: bytes, kind: GGMLQuantizationType, message: str
) -> None:
    refused(changed(tmp_path, with_type(name, kind)), message)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_vector_that_the_cpu_cannot_add(tmp_path: Path, kind: str) -> None:
    """A GPU can."""
    path = changed(tmp_path, with_type(b"output_norm.weight", GGMLQuantizationType[kind]))
    refused_by(tiny_llama, path, "its vector output_norm.weight is not in f32, which the CPU needs")
    check_header(str(path))


@pytest.mark.parametrize("missing", [1, 1000, 100_000])
def test_file_that_was_cut_off(tmp_path: Path, missing: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    content = path.read_bytes()
    path.write_bytes(content[:-missing])
    refused(path, f"it has {len(content) - missing:,} bytes of at least {len(content):,}")


@pytest.mark.parametrize("length", [4, 5, 30, 1000, 5000])
def test_header_that_was_cut_off(tmp_path: Path, length: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    path.write_bytes(path.read_bytes()[:length])
    refused(path, "its header cannot be read")


def test_part_of_a_model_that_does_not_say_which(tmp_path: Path) -> None:
    """llama.cpp takes the number's type on trust."""
    first = changed(
        tmp_path,
        lambda image: image.pairs.append(Pair(b"split.count", UINT16, 0, 2)),
        name="tiny-00001-of-00002.gguf",
    )
    (tmp_path / "tiny-00002-of-00002.gguf").write_bytes(first.read_bytes())
    refused(first, "tiny-00002-of-00002.gguf is damaged: it does not say which part it is")


def in_files(path: Path, seed: int) -> list[Path]:
    """A sound model in several files."""
    writer = partial(GGUFWriter, split_max_tensors=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "GGUFWriter", writer)
        write_tiny_gguf(path, seed=seed)
    return sorted(path.parent.glob(f"{path.stem}-0*"))


def test_file_that_is_missing(tmp_path: Path) -> None:
    first, second, *_ = in_files(tmp_path / "m.gguf", seed=1)
    tiny_llama(first).close()
    for use in (tiny_llama, read_header):
        with pytest.raises(ModelError, match="one of the 4 files of a model: give the first one"):
            use(second)
    second.rename(tmp_path / "other.gguf")
    for use in (tiny_llama, read_header):
        with pytest.raises(ModelError, match=f"{second.name} is not beside it: fetch that one"):
            use(first)


def test_files_of_a_model_that_is_called_alike(tmp_path: Path) -> None:
    """Its name begins with this one's, and ends as this one's does."""
    first, *others = in_files(tmp_path / "m.gguf", seed=1)
    [*_, last] = in_files(tmp_path / "m-large.gguf", seed=2)
    last.write_bytes(last.read_bytes()[:300])
    assert files_of(first) == [first, *others]
    assert read_header(first).file_bytes == sum(path.stat().st_size for path in [first, *others])
    assert read_model(first).file_bytes == read_header(first).file_bytes


def test_tokenizer_of_no_vocabulary(tmp_path: Path) -> None:
    """Tokens are evaluated as ever; text has none."""

    def change(image: Image) -> None:
        [pair] = [each for each in image.pairs if each.key == b"tokenizer.ggml.model"]
        pair.value = b"no_vocab"

    with tiny_llama(changed(tmp_path, change), hh=8, recent=8) as llm:
        llm.eval([5, 6, 7])
        with pytest.raises(ModelError, match="has no vocabulary"):
            llm.tokenize(b"text")
        with pytest.raises(ModelError, match="has no vocabulary"):
            llm.detokenize([5, 6, 7])


def test_token_before_each_text_that_is_none(tmp_path: Path) -> None:
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


def test_text_of_a_model_that_was_trained_on_long_ones(tmp_path: Path) -> None:
    """llama_cpp takes 8 GiB for the tokens of a word, and has them filled with zeros."""
    path = changed(tmp_path, with_values({"context_length": 2**31 - 1}))
    with tiny_llama(path, n_ctx=64, hh=8, recent=8) as llm:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tokens = llm.tokenize(b"text")
        assert llm.detokenize(tokens) == b"text"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 1 << 20


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_sound_model_is_not_refused(tmp_path: Path, variant: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, n_layer=4, arch_variant=variant)
    check_header(str(path), on_cpu=True)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_type_of_matrices_is_not_refused(tmp_path: Path, name: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=1, dtype=GGMLQuantizationType[name])
    check_header(str(path), on_cpu=True)


def changed(folder: Path, change: Callable[[Image], object], *, name: str = "tiny.gguf") -> Path:
    """A tiny model with another header."""
    path = write_tiny_gguf(folder / name, seed=1)
    image = read_image(path)
    change(image)
    path.write_bytes(image.header() + image.data)
    return path


def refused(path: Path, message: str) -> None:
    """Expect a line that says what is wrong and what to do, wherever a model is opened."""
    for use in (tiny_llama, read_header):
        refused_by(use, path, message)


def refused_by(use: Callable[[Path], object], path: Path, message: str) -> None:
    with pytest.raises(ModelError) as error:
        use(path)
    assert message in str(error.value)
    assert "is damaged" in str(error.value)
    assert "fetch it again" in str(error.value)
    assert "\n" not in str(error.value)
