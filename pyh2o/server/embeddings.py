"""OpenAI's embeddings."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.embedding import Embedder
from ..errors import BusyError
from ..limits import LOOK_SECONDS, Limits
from .bodies import EmbeddingBody
from .refusals import wrong_field
from .served_model import Served


class EmbeddingModel(Served):
    """An embedding model; requests take turns after each text."""

    def __init__(self, embedder: Embedder, name: str, limits: Limits) -> None:
        super().__init__(embedder, name, limits)
        self.embedder = embedder
        self.prompt_tokens = 0
        self._turn = threading.Lock()

    @property
    def longest_prompt(self) -> int:
        return self.embedder.window

    def grown_bytes(self) -> int:
        """Return 0: its memory does not grow."""
        return 0

    def close(self) -> None:
        """Free the model, after the current text."""
        with self._turn:
            self.embedder.close()

    def embed(
        self, body: EmbeddingBody, *, name: str = "input", truncate: bool = False
    ) -> dict[str, Any]:
        """Return the normalized vectors of the texts in the field `name` of a request."""
        n_values = self.embedder.n_values
        if body.dimensions not in (None, n_values):
            raise wrong_field(
                "dimensions", f"the vectors of {self.name} have {n_values} values: omit it"
            )
        texts = [
            self._tokens(given, name if len(body.input) == 1 else f"{name}[{number}]", truncate)
            for number, given in enumerate(body.input)
        ]
        vectors = []
        for tokens in texts:
            with self._my_turn():  # per text: a long list must not block other requests
                vectors.append(self.embedder.embed_tokens(tokens))
                self.prompt_tokens += len(tokens)
        n_tokens = sum(map(len, texts))
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": number,
                    "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode()
                    if body.encoding_format == "base64"
                    else vector.tolist(),
                }
                for number, vector in enumerate(vectors)
            ],
            "model": self.name,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def _tokens(self, given: str | list[int], param: str, truncate: bool) -> list[int]:
        """Return the tokens of a text, or check the given ones."""
        self.check()
        if isinstance(given, str):
            given = self.embedder.tokenize(given.encode())
        else:
            self.check_tokens(given, param)
        if not given:
            raise wrong_field(param, "a text without tokens has no embedding: omit it")
        most = self.longest_prompt
        if truncate and len(given) > most:
            # keep the end token
            end = [token for token in given[-1:] if token in self.embedder.tokenize(b"")]
            given = [*given[: most - len(end)], *end]
        if len(given) > most:
            raise wrong_field(
                param,
                f"the text has {len(given):,} tokens, the limit is {most:,}: split it",
                code="context_length_exceeded",
            )
        return given

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        # Waits are counted, not timed: a clock would include the time a machine was suspended.
        n_waits = max(1, math.ceil(self.limits.wait_seconds / LOOK_SECONDS))
        while not self._turn.acquire(timeout=LOOK_SECONDS):
            self.check()
            n_waits -= 1
            if n_waits == 0:
                raise BusyError("the model was busy for too long: try again later")
        try:
            self.check()
            yield
        finally:
            self._turn.release()
