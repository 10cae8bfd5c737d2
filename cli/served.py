"""The models that `pyh2o serve` is given: looked at when it starts, loaded when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyh2o.engine import Engine
from pyh2o.errors import UnsupportedModelError
from pyh2o.llama.description import describe_model
from pyh2o.llama.embedding import EmbeddingLlama, embedding_bytes
from pyh2o.llama.header import ModelHeader, read_header
from pyh2o.models import find_model
from pyh2o.openai.limits import Limits
from pyh2o.openai.server import EmbeddingModel, ModelSource, ServedModel

from .loading import cache_settings, machine_settings, say_layers, with_gpu_layers
from .options import ModelOptions


def model_sources(
    options: ModelOptions,
    given: Sequence[Path | None],
    *,
    texts: int,
    store_mib: int,
    limits: Limits,
) -> list[ModelSource]:
    """The models as the server loads them.

    Of several models each is described first: what would keep one from being loaded is said now.

    Args:
        options: for each of them.
        given: their files or names; None for the demo model.
        texts: places for texts, of each model that writes.
        store_mib: most MiB for texts without a place, of each model that writes.
        limits: of requests.

    Raises:
        PyH2OError: a model that is missing, broken or refused, or settings that make no sense.
    """
    paths = [find_model(each) for each in given]
    headers = [_usable_header(path) for path in paths]
    loads = _Loads(options, machine_settings(options), texts, store_mib, limits)
    sources = []
    for path, header in zip(paths, headers, strict=True):
        embeds = header.has_embeddings
        sources.append(
            ModelSource(
                name=path.stem,
                load=loads.embedding(path) if embeds else loads.writing(path),
                n_at_once=1 if embeds else texts,
                embeds=embeds,
                needed_bytes=loads.needed_bytes(path, header) if len(paths) > 1 else 0,
                path=path,
            )
        )
    return sources


def _usable_header(path: Path) -> ModelHeader:
    header = read_header(path)
    if not header.causal and not header.has_embeddings:
        raise UnsupportedModelError(
            f"{path} cannot be served: its tokens see the whole text, so it writes none, and its "
            "file has no pooling type that makes an embedding of them"
        )
    return header


@dataclass(frozen=True)
class _Loads:
    """How models are loaded; the fields are the arguments of `model_sources`.

    Attributes:
        machine: what `machine_settings` makes of the options, and may say a line about.
    """

    options: ModelOptions
    machine: dict[str, Any]
    texts: int
    store_mib: int
    limits: Limits

    def writing(self, path: Path) -> Callable[[Callable[[float], None]], ServedModel]:
        """What loads a model that writes text."""

        def load(on_load: Callable[[float], None]) -> ServedModel:
            machine = with_gpu_layers(self.machine, self.options, path, texts=self.texts)
            engine = Engine(
                str(path),
                texts=self.texts,
                store_mib=self.store_mib,
                load_progress=on_load,
                **machine,
                **cache_settings(self.options),
            )
            say_layers(engine.model, self.options)
            return ServedModel(engine, path.stem, self.limits)

        return load

    def embedding(self, path: Path) -> Callable[[Callable[[float], None]], EmbeddingModel]:
        """What loads a model for embeddings."""

        def load(on_load: Callable[[float], None]) -> EmbeddingModel:
            llama = EmbeddingLlama(
                path, n_ctx=self.options.ctx, load_progress=on_load, **self.machine
            )
            say_layers(llama, self.options)
            return EmbeddingModel(llama, path.stem, self.limits)

        return load

    def needed_bytes(self, path: Path, header: ModelHeader) -> int:
        """About what a model takes of the memory: the weights, and the caches of all its places.

        Raises:
            PyH2OError: it cannot be loaded with these settings.
        """
        options = self.options
        if header.has_embeddings:
            return header.file_bytes + embedding_bytes(header, options.ctx)
        found = describe_model(
            path,
            options.eviction,
            n_ctx=options.ctx or header.trained_context,
            kv_type=options.kv_type.value,
        )
        if found.refused is not None and not options.no_evict:
            raise UnsupportedModelError(
                f"{path}: {found.refused}; --no-evict keeps the full cache, for all models"
            )
        cache = found.full if options.no_evict else found.evicting
        return header.file_bytes + (0 if cache is None else self.texts * cache.total)
