"""What is wrong with a model's file, found before llama.cpp asserts that it is not."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import _internals as internals

from ..errors import ModelError
from ..library.backends import F32, is_float, traits_of
from .gguf_file import UINT16, GgufFile, Tensor, files_of

# Whose level says what of llama.cpp's log is shown.
LOGGER = logging.getLogger("llama-cpp-python")

_MOST_LAYERS = 512
_MOST_EXPERTS = 1024
_MOST_TOKENS = 2**31 - 1
_NO_VOCABULARY = ("no_vocab", "none")
_TENSOR_ALIGNMENT = 32  # of ggml's buffers, in bytes
_BYTE = 6  # the type of a token that stands for a byte
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Weights that matrices of tokens are multiplied with, or that tokens are looked up in.
_MATRIX = re.compile(
    r"(token_embd|output|attn_(q|k|v|qkv|output)|ffn_(up|gate|down)(_exps|_shexp)?)\.weight$"
)
# Vectors that are added or multiplied element by element.
_VECTOR = re.compile(r"(norm\.weight|\.bias)$")
# llama.cpp knows their recurrent layers with twice the elements of a token, and no others.
_RECURRENT_TWICE_AS_WIDE = ("jamba", "granitehybrid")
# llama.cpp takes their number of experts for none if it is 1.
_EXPERTS_MAY_BE_ONE = ("hunyuan-dense", "hunyuan_vl")


def check_file(path: str) -> None:
    """Refuse what is no model file, before anything is loaded.

    Raises:
        ModelError: it is missing, or no GGUF file.
    """
    file = Path(path)
    if not file.exists():
        raise ModelError(f"there is no model file {path}: check the path")
    if not file.is_file():
        raise ModelError(f"{path} is not a file: give the path of a GGUF file")
    with file.open("rb") as data:
        if data.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: convert the model to GGUF first")


class _SystemPath(str):
    """A path that llama_cpp passes to C as the system has it, which may not be UTF-8."""

    def encode(self, *_: Any, **__: Any) -> bytes:
        return os.fsencode(str(self))


def native_model(path: str, params: Any, *, verbose: bool) -> Any:
    """Load a model by llama.cpp's parameters.

    Raises:
        ModelError: llama.cpp cannot load it.
    """
    try:
        return internals.LlamaModel(path_model=_SystemPath(path), params=params, verbose=verbose)
    except ValueError as error:
        raise ModelError(load_failure(path)) from error


def load_failure(path: str) -> str:
    """That llama.cpp could not load a model, and what may be wrong, in a line."""
    return (
        f"llama.cpp cannot load {path}: the file is damaged or of an unknown architecture; "
        "verbose=True (--verbose) shows its log"
    )


def check_header(
    model_path: str, *, on_cpu: bool = False, verbose: bool = False
) -> tuple[bool, set[int]]:
    """Refuse a model whose header llama.cpp would end the process for, or that was cut off.

    Headers alone are read, of all its files. What llama.cpp refuses by itself is left to it.

    Args:
        model_path: of a file that is there.
        on_cpu: all layers will be computed there, where ggml knows fewer types of vectors.
        verbose: show llama.cpp's log.

    Returns:
        whether llama.cpp may map the model into memory, for which it asserts where tensors begin;
        and ggml's numbers of the types that the tensors have.

    Raises:
        ModelError: the file is damaged.
    """
    first, *others = files_of(Path(model_path)) or [Path(model_path)]
    with _opened(first, verbose=verbose) as file:
        tensors = list(file.tensors())
        wrong = [*_wrong_tensors(tensors, first, on_cpu=on_cpu)]
        wrong += [*_wrong_numbers(file), *_wrong_tokens(file)]
        _refuse(first, wrong)
        n_files = file.n_files()
    _refuse_parts(first, n_files)
    for path in others if n_files > 1 else []:
        with _opened(path, verbose=verbose) as file:
            wrong = [] if file.kind("split.no") == UINT16 else ["it does not say which part it is"]
            of_file = list(file.tensors())
            _refuse(path, [*wrong, *_wrong_tensors(of_file, path, on_cpu=on_cpu)])
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
    """What is shown of llama.cpp's log is afterwards as before."""
    level = LOGGER.level
    try:
        yield
    finally:
        LOGGER.setLevel(level)


def _refuse(path: Path, wrong: list[str]) -> None:
    if wrong:
        raise ModelError(f"{path} is damaged: {wrong[0]}; fetch it again")


def _refuse_parts(path: Path, n_files: int) -> None:
    """See that a file is the first of its model, and that all others are beside it."""
    if n_files == 1:
        return
    ending = f"-00001-of-{n_files:05}.gguf"
    if not path.name.endswith(ending):
        raise ModelError(
            f"{path} is one of the {n_files} files of a model: give the first one, under its own "
            f"name, which ends with {ending}"
        )
    stem = path.name.removesuffix(ending)
    names = [f"{stem}-{i:05}-of-{n_files:05}.gguf" for i in range(1, n_files + 1)]
    for name in names:
        if not path.with_name(name).is_file():
            raise ModelError(
                f"{path} is the first of the {n_files} files of a model, and {name} is not beside "
                "it: fetch that one, too"
            )


def _wrong_tensors(tensors: Sequence[Tensor], path: Path, *, on_cpu: bool) -> Iterator[str]:
    """Whether tensors end behind the file, or are of types that nothing is computed with.

    ggml's CPU backend aborts where it adds or multiplies vectors that are not in f32.
    """
    size = path.stat().st_size
    end = max((tensor.end for tensor in tensors), default=0)
    if end > size:
        yield f"it has {size:,} bytes of at least {end:,}"
    for tensor in tensors:
        is_weight = is_float(tensor.kind) or traits_of(tensor.kind).is_quantized
        if _VECTOR.search(tensor.name):
            if not is_float(tensor.kind):
                yield f"its vector {tensor.name} is of a type for other things"
            elif on_cpu and tensor.kind != F32:
                yield f"its vector {tensor.name} is not in f32, which the CPU needs"
        elif _MATRIX.search(tensor.name) and not is_weight:
            yield f"its matrix {tensor.name} is of a type for other things"


def _wrong_tokens(file: GgufFile) -> Iterator[str]:
    """Whether texts of tokens are there twice, in a vocabulary that is read."""
    if file.text("tokenizer.ggml.model") in _NO_VOCABULARY:
        return
    token = file.repeated_token()
    if token is not None:
        yield f"its token {token} has the text of an earlier one"


def _wrong_numbers(file: GgufFile) -> Iterator[str]:
    """What llama.cpp asserts of the numbers that most architectures have."""
    architecture = file.text("general.architecture") or ""
    n_layer = file.number(f"{architecture}.block_count")
    if n_layer is not None:
        if not 0 < n_layer <= _MOST_LAYERS:
            yield f"it has {n_layer} layers, not 1 to {_MOST_LAYERS}"
        if (n_more := file.number(f"{architecture}.nextn_predict_layers") or 0) > n_layer:
            yield f"{n_more} of its {n_layer} layers predict further tokens"
    if (n_tokens := file.number(f"{architecture}.context_length") or 0) > _MOST_TOKENS:
        yield f"it was trained on texts of {n_tokens} tokens, more than {_MOST_TOKENS}"
    for kind in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        epsilon = file.real(f"{architecture}.attention.{kind}")
        if epsilon is not None and not epsilon >= 0:
            yield f"its {kind} is {epsilon}"
    if file.text("tokenizer.ggml.model") == "bert" and _BYTE in (
        file.numbers("tokenizer.ggml.token_type") or []
    ):
        yield "it has tokens for bytes, which its tokenizer has not"
    yield from _wrong_rotation(file, architecture)
    yield from _wrong_experts(file, architecture)
    yield from _wrong_recurrence(file, architecture)


def _wrong_rotation(file: GgufFile, architecture: str) -> Iterator[str]:
    """How queries and keys are rotated."""
    scaling = file.text(f"{architecture}.rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        yield f"it scales positions by {scaling!r}, not by one of {', '.join(_ROPE_SCALINGS)}"
    n_rotated = file.number(f"{architecture}.rope.dimension_count") or 0
    sections = file.numbers(f"{architecture}.rope.dimension_sections") or []
    [n_head, *_] = file.numbers(f"{architecture}.attention.head_count") or [0]
    if not n_head:
        return
    size = file.number(f"{architecture}.attention.key_length")
    if size is None:
        size = (file.number(f"{architecture}.embedding_length") or 0) // n_head
    latent = file.number(f"{architecture}.attention.key_length_mla")
    n_wanted = max(n_rotated, sum(sections))
    if n_rotated % 2 or n_wanted > size or (latent is not None and n_rotated >= latent):
        yield f"it rotates {n_wanted} of the {size} elements of a key"


def _wrong_experts(file: GgufFile, architecture: str) -> Iterator[str]:
    n_experts = file.number(f"{architecture}.expert_count") or 0
    n_used = max(file.numbers(f"{architecture}.expert_used_count") or [0])
    n_groups = file.number(f"{architecture}.expert_group_count") or 0
    n_groups_used = file.number(f"{architecture}.expert_group_used_count") or 0
    if architecture in _EXPERTS_MAY_BE_ONE and n_experts <= 1:
        n_experts = n_used = 0
    wrong_number = not n_used <= n_experts <= _MOST_EXPERTS or bool(n_experts and not n_used)
    wrong_groups = n_groups and (
        n_groups >= n_experts
        or (n_groups > 1 and (n_experts % n_groups or not 0 < n_groups_used < n_groups))
    )
    if wrong_number or wrong_groups:
        yield (
            f"a token takes {n_used} of its {n_experts} experts, of {n_groups_used} of {n_groups} "
            "groups"
        )


def _wrong_recurrence(file: GgufFile, architecture: str) -> Iterator[str]:
    n_embd = file.number(f"{architecture}.embedding_length")
    n_inner = file.number(f"{architecture}.ssm.inner_size")
    if architecture not in _RECURRENT_TWICE_AS_WIDE or n_embd is None or n_inner is None:
        return
    if n_inner != 2 * n_embd:
        yield f"its recurrent layers have {n_inner} elements, not twice the {n_embd} of a token"
