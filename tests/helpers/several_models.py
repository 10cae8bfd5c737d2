"""Several tiny models for one server, with load counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from many_texts import tiny_engine
from pyh2o.core.embedding import Embedder
from pyh2o.core.parameters import Parameters
from pyh2o.models.file_identity import identify
from pyh2o.server import EmbeddingModel, Limits, ModelSource, ServedModel, ServedModels
from pyh2o.sessions.identity import ModelIdentity
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import ONE_THREAD

CACHE: dict[str, Any] = {"n_ctx": 256, "hh": 32, "recent": 32, "slack": 16}
TRAINED = 128
"""Tokens that the embedding models have learned positions for."""


def write_models(folder: Path) -> dict[str, Path]:
    """Write two models that generate, and one for embeddings."""
    paths = {
        name: write_tiny_gguf(
            folder / f"{name}.gguf", seed=seed, n_ctx_train=1024, chat_template=CHAT_TEMPLATE
        )
        for seed, name in enumerate(("first", "second", "third"))
    }
    paths["bert"] = write_encoder(folder / "bert.gguf")
    return paths


def write_encoder(path: Path) -> Path:
    return write_tiny_gguf(
        path, seed=9, n_layer=2, n_head_kv=4, n_ctx_train=TRAINED, arch_variant="encoder"
    )


class Loads:
    """Loads models and counts loads.

    Models that are `held` wait for `resume`; `failures` are raised instead of loading a model.
    """

    def __init__(self, paths: dict[str, Path], limits: Limits | None = None) -> None:
        self.paths = paths
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        self.held: set[str] = set()
        self.resume = threading.Event()
        self.failures: dict[str, Exception] = {}

    def models(self, *names: str) -> ServedModels:
        """Return a server's models; the first of them is loaded."""
        models = ServedModels([self.source(name) for name in names], self.limits)
        models.start(lambda _: None)
        return models

    def source(self, name: str, *, texts: int = 2, needed_bytes: int = 0) -> ModelSource:
        """Return a model as a server expects it."""
        embeds = name == "bert"
        load = self._embedding if embeds else self._writing

        def counted(on_load: Callable[[float], None]) -> Any:
            self.counts[name] += 1
            while name in self.held and not self.resume.wait(0.01):
                on_load(0.5)
            if name in self.failures:
                raise self.failures[name]
            return load(name, texts, on_load)

        path = None if embeds else self.paths.get(name)
        identity = path and ModelIdentity(**identify(path).record())
        return ModelSource(name, counted, texts, embeds, needed_bytes, identity)

    def _writing(self, name: str, texts: int, on_load: Callable[[float], None]) -> ServedModel:
        engine = tiny_engine(self.paths[name], texts=texts, load_progress=on_load, **CACHE)
        return ServedModel(engine, name, self.limits)

    def _embedding(self, name: str, _texts: int, on_load: Callable[[float], None]) -> Any:
        parameters = Parameters(**ONE_THREAD)
        model = Embedder(self.paths[name], load_progress=on_load, parameters=parameters)
        return EmbeddingModel(model, name, self.limits)
