"""A model that turns texts into vectors."""

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

# The window where none is asked for, if the trained context is larger: attention takes memory by
# its square.
LARGEST_WINDOW_BY_DEFAULT = 2048


class Embedder(Model):
    """A model for embeddings: a text is read at once and in full, so the window is the batch.

    Args:
        path: a GGUF file that says how the vectors of its tokens become one.
        n_ctx: most tokens of a text, the trained context at most; 0 for that, or for
            `LARGEST_WINDOW_BY_DEFAULT` if it is larger.
        parameters: what llama.cpp gets, but for the batch.
        **settings: as for `Model`, but for what belongs to eviction.

    Raises:
        UnsupportedModelError: the model was not made for embeddings.
        PyH2OError: as for `Model`.

    Attributes:
        n_values: of a vector.
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
                f"{os.fspath(path)} does not say how it makes one vector of a text: take a "
                "model that was made for embeddings, whose file has a pooling type"
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
        """The vector of a text, of length 1; [n_values].

        Args:
            tokens: of the vocabulary, with those that begin and end a text; as many as there is
                room for in the window, and at least one.

        Raises:
            RuntimeError: llama.cpp failed, or some of the values are no numbers.
        """
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
            raise RuntimeError("the model's embedding of this text has values that are no numbers")
        return vector / np.float32(length) if length else vector


def embedding_window(header: ModelHeader, n_ctx: int = 0) -> int:
    """Most tokens of a text whose embedding is asked for (see `Embedder`)."""
    return min(n_ctx or LARGEST_WINDOW_BY_DEFAULT, header.trained_context)


def embedding_bytes(header: ModelHeader, n_ctx: int = 0) -> int:
    """About what the longest text takes beside the weights: attention, and logits if there are."""
    window = embedding_window(header, n_ctx)
    n_values = window * header.n_head + (header.n_vocab if header.causal else 0)
    return 4 * window * n_values
