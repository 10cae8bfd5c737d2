"""What has to be known of the model before any cache is made for it, and a text in its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from ...errors import ModelError


@dataclass(frozen=True)
class BenchModel:
    """A model file.

    Attributes:
        path: of the file.
        n_ctx_train: positions the model was trained on.
        weight_bytes: all tensors (llama_model_size).
        n_params: their elements.
        file_bytes: the file.
    """

    path: Path
    n_ctx_train: int
    weight_bytes: int
    n_params: int
    file_bytes: int


def english_text() -> str:
    """A long text that every Python has: its own documentation."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_model(path: Path) -> BenchModel:
    """The model's facts; its tensors are not loaded.

    Raises:
        ModelError: the file is missing or no model.
    """
    model = _open(path)
    try:
        metadata = model.metadata()
        architecture = metadata.get("general.architecture", "")
        n_ctx_train = int(metadata.get(f"{architecture}.context_length", 0))
        if n_ctx_train <= 0:
            raise ModelError(f"{path} does not say what context it was trained on: give another")
        return BenchModel(path, n_ctx_train, model.size(), model.n_params(), path.stat().st_size)
    finally:
        model.close()


def text_tokens(path: Path, text: str, n_tokens: int) -> tuple[int, ...]:
    """The beginning of a text, which is repeated if it is too short.

    Raises:
        ModelError: the file is missing or no model.
        ValueError: the text has no tokens.
    """
    model = _open(path)
    try:
        data = text.encode("utf-8")
        tokens: list[int] = model.tokenize(data, True, False)
        again: list[int] = model.tokenize(data, False, False)
    finally:
        model.close()
    if not again:
        raise ValueError("the text has no tokens")
    while len(tokens) < n_tokens:
        tokens += again
    return tuple(tokens[:n_tokens])


def _open(path: Path) -> Any:
    """llama_cpp's model without its tensors."""
    import llama_cpp
    from llama_cpp import _internals

    if not path.is_file():
        raise ModelError(f"there is no model file {path}: check the path")
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    try:
        return _internals.LlamaModel(path_model=str(path), params=params, verbose=False)
    except ValueError:
        raise ModelError(
            f"llama.cpp cannot load {path}: it is no GGUF file, damaged or of an unknown "
            "architecture"
        ) from None
