"""Embedding models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals

from ..cache.kv_cache import FloatArray
from ..errors import UnsupportedModelError
from ..models.header import ModelHeader, read_header
from .model import Model
from .parameters import Parameters

# Maximum of the default window: the memory of attention grows with its square.
LARGEST_WINDOW_BY_DEFAULT = 2048


class Embedder(Model):
    """An embedding model, which reads a text in one batch: the batch has the size of the window.

    Args:
        path: a GGUF file with a pooling type.
        n_ctx: maximum tokens of a text, limited by the trained context; 0 for the trained context,
            up to `LARGEST_WINDOW_BY_DEFAULT`.
        parameters: parameters of llama.cpp; the batch size is ignored.

    Attributes:
        n_values: dimension of the vectors.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int = 0,
        parameters: Parameters | None = None,
        **settings: Any,
    ) -> None:
        header = read_header(path)
        if not header.has_embeddings:
            raise UnsupportedModelError(
                f"{os.fspath(path)} is not an embedding model: use a file that has a pooling type"
            )
        window = embedding_window(header, n_ctx)
        super().__init__(
            os.fspath(path),
            evict=False,
            n_ctx=window,
            parameters=replace(
                parameters or Parameters(), embedding=True, n_batch=window, n_ubatch=window
            ),
            **settings,
        )
        self.n_values = int(llama_cpp.llama_model_n_embd_out(self.native.model))
        self._embedded = internals.LlamaBatch(
            n_tokens=self.n_batch, embd=0, n_seq_max=1, verbose=self.verbose
        )
        self._stack.callback(self._embedded.close)

    def embed_tokens(self, tokens: Sequence[int]) -> FloatArray:
        """Return the normalized embedding of a text, with BOS and EOS; [n_values]."""
        with self.lock.context():
            batch, context = self._embedded, self.context
            batch.reset()
            batch.add_sequence(tokens, 0, True)
            context.kv_cache_clear()
            context.decode(batch)
            values = llama_cpp.llama_get_embeddings_seq(context.ctx, 0)
            vector: FloatArray = np.array(values[: self.n_values], np.float32)
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length):
            raise RuntimeError("the embedding of this text has infinite or NaN values")
        return vector / np.float32(length) if length else vector


def embedding_window(header: ModelHeader, n_ctx: int = 0) -> int:
    """Return the maximum tokens of a text (see `Embedder`)."""
    return min(n_ctx or LARGEST_WINDOW_BY_DEFAULT, header.trained_context)


def embedding_bytes(header: ModelHeader, n_ctx: int = 0) -> int:
    """Estimate the memory for the longest text, without weights: attention and logits."""
    window = embedding_window(header, n_ctx)
    n_values = window * header.n_head + (header.n_vocab if header.causal else 0)
    return 4 * window * n_values
