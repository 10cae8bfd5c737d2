"""Checks of model files, and loading them with llama.cpp.

llama.cpp refuses most damaged files, but ends the process where it asserts what a header says.
Only such values are checked here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import _internals as internals

from ..errors import ModelError
from ..library.backends import F32, is_float, traits_of
from .gguf_file import UINT16, GgufFile, Tensor, files_of

# llama_cpp's, whose level decides what is shown of llama.cpp's log.
LOGGER = logging.getLogger("llama-cpp-python")

_MOST_LAYERS = 512
_MOST_EXPERTS = 1024
_MOST_TOKENS = 2**31 - 1  # n_ctx is an int32
_NO_VOCABULARY = ("no_vocab", "none")
_TENSOR_ALIGNMENT = 32  # of ggml's buffers, in bytes
_BYTE = 6  # the type of a token that stands for a byte
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Weights of matrix products and of token lookups.
_MATRIX = re.compile(
    r"(token_embd|output|attn_(q|k|v|qkv|output)|ffn_(up|gate|down)(_exps|_shexp)?)\.weight$"
)
# Vectors that are added or multiplied element by element.
_VECTOR = re.compile(r"(norm\.weight|\.bias)$")
# The inner size of their recurrent layers is asserted.
_RECURRENT_TWICE_AS_WIDE = ("jamba", "granitehybrid")
# llama.cpp treats one expert as none in these architectures.
_EXPERTS_MAY_BE_ONE = ("hunyuan-dense", "hunyuan_vl")


def check_file(path: str) -> None:
    """Refuse a path that is not a GGUF file."""
    file = Path(path)
    if not file.exists():
        raise ModelError(f"there is no model file {path}: check the path")
    if not file.is_file():
        raise ModelError(f"{path} is not a file: give the path of a GGUF file")
    with file.open("rb") as data:
        if data.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: convert the model to GGUF first")


class _SystemPath(str):
    """A path that llama_cpp passes to C in the system's encoding, which may not be UTF-8."""

    def encode(self, *_: Any, **__: Any) -> bytes:
        return os.fsencode(str(self))


def native_model(path: str, params: Any, *, verbose: bool) -> Any:
    try:
        return internals.LlamaModel(path_model=_SystemPath(path), params=params, verbose=verbose)
    except ValueError as error:
        raise ModelError(load_failure(path)) from error


def load_failure(path: str) -> str:
    return (
        f"llama.cpp cannot load {path}: the file is damaged or of an unknown architecture; "
        "verbose=True (--verbose) shows its log"
    )


def check_header(
    model_path: str, *, on_cpu: bool = False, verbose: bool = False
) -> tuple[bool, set[int]]:
    """Refuse a model that llama.cpp would end the process for, or that was cut off.

    Only the headers of its files are read.

    Args:
        on_cpu: all layers will be computed on the CPU, where ggml supports fewer types of vectors.

    Returns:
        whether llama.cpp may map the model into memory, for which it asserts the alignment of
        tensors; and ggml's numbers of the types of tensors.
    """
    first, *others = files_of(Path(model_path)) or [Path(model_path)]
    with _opened(first, verbose=verbose) as file:
        tensors = list(file.tensors())
        _refuse(first, _wrong_tensors(tensors, first, on_cpu=on_cpu))
        _refuse(first, _wrong_values(file))
        n_files = file.number("split.count") or 1
    _check_parts(first, n_files)
    for path in others if n_files > 1 else []:
        with _opened(path, verbose=verbose) as file:
            if file.kind("split.no") != UINT16:
                _refuse(path, ["it has no part number"])
            of_file = list(file.tensors())
            _refuse(path, _wrong_tensors(of_file, path, on_cpu=on_cpu))
            tensors += of_file
    can_be_mapped = all(tensor.start % _TENSOR_ALIGNMENT == 0 for tensor in tensors)
    return can_be_mapped, {tensor.kind for tensor in tensors}


def _opened(path: Path, *, verbose: bool) -> GgufFile:
    with log_level_kept():
        if not verbose:
            LOGGER.setLevel(logging.CRITICAL)
        try:
            return GgufFile(path)
        except ModelError:
            raise ModelError(
                f"{path} is damaged: its header cannot be read; fetch it again "
                "(verbose=True, --verbose, shows llama.cpp's log)"
            ) from None


@contextlib.contextmanager
def log_level_kept() -> Iterator[None]:
    """Restore the log level of llama_cpp afterwards."""
    level = LOGGER.level
    try:
        yield
    finally:
        LOGGER.setLevel(level)


def _refuse(path: Path, reasons: Iterable[str]) -> None:
    for reason in reasons:
        raise ModelError(f"{path} is damaged: {reason}; fetch it again")


def _check_parts(path: Path, n_files: int) -> None:
    """Refuse a file that is not the first one of its model, or whose other files are missing."""
    if n_files == 1:
        return
    ending = f"-00001-of-{n_files:05}.gguf"
    if not path.name.endswith(ending):
        raise ModelError(
            f"{path} is one of the {n_files} files of a model: give the first one, under its own "
            f"name, which ends with {ending}"
        )
    stem = path.name.removesuffix(ending)
    for i in range(2, n_files + 1):
        name = f"{stem}-{i:05}-of-{n_files:05}.gguf"
        if not path.with_name(name).is_file():
            raise ModelError(
                f"{path} is the first of the {n_files} files of a model, and {name} is not in the "
                "same folder: fetch that one, too"
            )


def _wrong_tensors(tensors: Sequence[Tensor], path: Path, *, on_cpu: bool) -> Iterator[str]:
    """Yield what is wrong with the tensors' ends and types.

    ggml's CPU backend aborts if it has to add or multiply vectors that are not in f32.
    """
    size = path.stat().st_size
    end = max((tensor.end for tensor in tensors), default=0)
    if end > size:
        yield f"it has {size:,} bytes of at least {end:,}"
    for tensor in tensors:
        is_weight = is_float(tensor.kind) or traits_of(tensor.kind).is_quantized
        if _VECTOR.search(tensor.name):
            if not is_float(tensor.kind):
                yield f"its vector {tensor.name} is not of a floating-point type"
            elif on_cpu and tensor.kind != F32:
                yield f"its vector {tensor.name} is not in f32, which the CPU needs"
        elif _MATRIX.search(tensor.name) and not is_weight:
            yield f"its matrix {tensor.name} is not of a type for weights"


def _wrong_values(file: GgufFile) -> Iterator[str]:
    """Yield the keys whose values llama.cpp asserts, with their values."""
    architecture = file.text("general.architecture") or ""

    def number(key: str) -> Any:
        return file.number(f"{architecture}.{key}") or 0

    def numbers(key: str) -> list[int]:
        return file.numbers(f"{architecture}.{key}") or [0]

    n_layer = file.number(f"{architecture}.block_count")
    scaling = file.text(f"{architecture}.rope.scaling.type")
    wrong = {
        "block_count": n_layer is not None and not 0 < n_layer <= _MOST_LAYERS,
        "nextn_predict_layers": n_layer is not None and number("nextn_predict_layers") > n_layer,
        "context_length": number("context_length") > _MOST_TOKENS,
        "attention.layer_norm_epsilon": not number("attention.layer_norm_epsilon") >= 0,
        "attention.layer_norm_rms_epsilon": not number("attention.layer_norm_rms_epsilon") >= 0,
        "rope.scaling.type": scaling is not None and scaling not in _ROPE_SCALINGS,
    }

    if n_head := numbers("attention.head_count")[0]:
        size = number("attention.key_length") or number("embedding_length") // n_head
        latent = number("attention.key_length_mla") or size + 1
        n_rotated = number("rope.dimension_count")
        wrong["rope.dimension_count"] = n_rotated % 2 or n_rotated > size or n_rotated >= latent
        wrong["rope.dimension_sections"] = sum(numbers("rope.dimension_sections")) > size

    n_experts, n_used = number("expert_count"), max(numbers("expert_used_count"))
    n_groups, n_groups_used = number("expert_group_count"), number("expert_group_used_count")
    if architecture in _EXPERTS_MAY_BE_ONE and n_experts <= 1:
        n_experts = n_used = 0
    wrong["expert_count"] = n_experts > _MOST_EXPERTS
    wrong["expert_used_count"] = n_used > n_experts or (n_experts and not n_used)
    wrong["expert_group_count"] = n_groups and (n_groups >= n_experts or n_experts % n_groups)
    wrong["expert_group_used_count"] = n_groups > 1 and not 0 < n_groups_used < n_groups

    inner = number("ssm.inner_size")
    has_inner = architecture in _RECURRENT_TWICE_AS_WIDE and inner
    wrong["ssm.inner_size"] = has_inner and inner != 2 * number("embedding_length")

    for key in (f"{architecture}.{name}" for name, is_wrong in wrong.items() if is_wrong):
        value = file.text(key) or file.numbers(key)
        yield f"{key} is {str(value).strip('[]') or 'missing'}"
    yield from _wrong_tokens(file)


def _wrong_tokens(file: GgufFile) -> Iterator[str]:
    """Yield the tokens that a vocabulary must not have."""
    tokenizer = file.text("tokenizer.ggml.model")
    if tokenizer == "bert" and _BYTE in file.numbers("tokenizer.ggml.token_type"):
        yield "it has byte tokens, which its tokenizer does not support"
    if tokenizer not in _NO_VOCABULARY and (token := file.repeated_token()) is not None:
        yield f"token {token} has the same text as an earlier token"
