"""Facts about a model, read without its weights."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import llama_cpp

from ..errors import ModelError
from .damage import check_file, check_header, load_failure, native_model
from .gguf_file import files_of

# Kinds of pooling that produce one vector per text; RANK produces a score.
_POOLED = (
    llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    llama_cpp.LLAMA_POOLING_TYPE_CLS,
    llama_cpp.LLAMA_POOLING_TYPE_LAST,
)


@dataclass(frozen=True)
class ModelHeader:
    """Facts about a model.

    Attributes:
        has_embeddings: whether it is an embedding model with a known kind of pooling.
        causal: whether a token attends to earlier tokens only.
        n_head: query heads of the layer that has most.
    """

    has_embeddings: bool
    trained_context: int
    causal: bool
    n_head: int
    n_vocab: int
    file_bytes: int


def read_header(path: str | os.PathLike[str]) -> ModelHeader:
    """Read the header of a model, including the vocabulary."""
    name = os.fspath(path)
    check_file(name)
    check_header(name)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    llama_cpp.llama_backend_init()
    with contextlib.closing(native_model(name, params, verbose=False)) as model:
        try:
            metadata = model.metadata()
        except UnicodeDecodeError as error:
            raise ModelError(load_failure(name)) from error
        architecture = metadata.get("general.architecture", "")
        pooling = metadata.get(f"{architecture}.pooling_type", "")
        # llama.cpp does not compute embeddings of models with an encoder and a decoder
        pooled = pooling in map(str, _POOLED) and not llama_cpp.llama_model_has_encoder(model.model)
        return ModelHeader(
            has_embeddings=pooled,
            trained_context=_largest(metadata.get(f"{architecture}.context_length")),
            causal=metadata.get(f"{architecture}.attention.causal") != "false",
            n_head=_largest(metadata.get(f"{architecture}.attention.head_count")),
            n_vocab=int(model.n_vocab()),
            file_bytes=sum(file.stat().st_size for file in files_of(Path(name))),
        )


def _largest(text: str | None) -> int:
    """Return the largest number in a value that is one number or one per layer, or 0."""
    return max(map(int, re.findall(r"\d+", text or "")), default=0)
