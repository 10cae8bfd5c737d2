"""Describe the cache of a model and its memory, without loading weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import llama_cpp

from ..cache.kv_cache import KVCache
from ..cache.native import MAX_POSITIONS, Layer, attach, layer_of, learned_positions, why_refused
from ..cache.settings import Budget, EvictionSettings, full_cache
from ..cache.statistics import KVStatistics
from ..errors import NativeError, SettingsError
from ..models.damage import log_level_kept
from ..models.gguf_file import GgufFile, files_of
from ..system.integers import LARGEST_INT32, check_count
from .context import ContextPlan, check_full_window, check_memory, new_context, plan_context
from .estimate import TextBytes, text_bytes
from .parameters import KV_TYPES, Parameters
from .weights import Weights, address

# Maximum of the default window.
LARGEST_WINDOW_BY_DEFAULT = 32_768

# Position encoding: RoPE, M-RoPE, learned embeddings, or none.
PositionKind = Literal["rotary", "several per token", "learned", "none"]

_SEVERAL_PER_TOKEN = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


@dataclass(frozen=True)
class CacheBytes:
    """The memory of one cache, in bytes.

    Attributes:
        cells: number of cells of full-attention layers.
        growing: K and V of full-attention layers.
        window: K and V of sliding-window layers.
        recurrent: states of recurrent layers.
    """

    cells: int
    growing: int
    window: int
    recurrent: int
    scores: int

    @property
    def total(self) -> int:
        return self.growing + self.window + self.recurrent + self.scores


@dataclass(frozen=True)
class ModelDescription:
    """A model that was not loaded.

    Attributes:
        layers: caches of the layers; empty for an unknown kind of cache.
        refused: why eviction does not support it, in one line; None if it does.
        goes_on: whether a text can exceed the trained context; None if `refused`.
        window: tokens that the caches are for.
        full: memory of the full cache; None if unknown.
        evicting: memory of the cache of fixed size; None if `refused`.
        budget: budget of the cache of fixed size; None if `refused`.
    """

    architecture: str
    n_layer: int
    layers: tuple[Layer, ...]
    trained_context: int
    positions: PositionKind
    refused: str | None
    goes_on: bool | None
    window: int
    kv_type: str
    full: CacheBytes | None
    evicting: CacheBytes | None
    budget: Budget | None

    def text(self, n_tokens: int) -> TextBytes:
        """Estimate the memory of a text of `n_tokens` tokens on a GPU.

        If `refused`, only the sizes of the full cache are valid.
        """
        budget = full_cache(EvictionSettings(), n_tokens)
        if self.budget is not None:
            budget = self.budget.settings.resolve(n_tokens, self.budget.n_pos, on_gpu=True)
        recurrent = self.full.recurrent if self.full else 0
        return text_bytes(self.layers, budget, kv_type=self.kv_type, recurrent=recurrent)

    def record(self) -> dict[str, Any]:
        record = asdict(self) | {"budget": self.budget and self.budget.saved()}
        for name, cache in (("full", self.full), ("evicting", self.evicting)):
            record[name] = cache and asdict(cache) | {"total": cache.total}
        return record


def describe_model(
    path: str | os.PathLike[str],
    settings: EvictionSettings | None = None,
    *,
    n_ctx: int = 0,
    kv_type: str = "f16",
    n_gpu_layers: int = 0,
    verbose: bool = False,
) -> ModelDescription:
    """Describe a model without loading its weights.

    The sizes are llama.cpp's: it reads the metadata and creates contexts without allocating them.

    Args:
        n_ctx: window in tokens; 0 for the trained context, up to `LARGEST_WINDOW_BY_DEFAULT`.
        kv_type: type of the rows: a key of `KV_TYPES`.
        n_gpu_layers: layers on a GPU, which changes the default budget.

    Raises:
        SettingsError: the settings do not fit the window.
        ModelError: the file is missing or llama.cpp cannot read it.
    """
    cure = "give 0 for the model's own"
    n_ctx = check_count("n_ctx", n_ctx, least=0, most=LARGEST_INT32, cure=cure)
    rows = KV_TYPES[kv_type]
    parameters = Parameters(type_k=rows, type_v=rows)
    with log_level_kept(), contextlib.ExitStack() as stack:
        weights = Weights(os.fspath(path), parameters, loaded=False, verbose=verbose)
        stack.callback(weights.close)
        trained = int(weights.native.n_ctx_train())
        window = n_ctx or min(trained, LARGEST_WINDOW_BY_DEFAULT)
        layers, full = _full_cache(weights, parameters, window)
        refused, evicting, budget, goes_on = why_refused(weights.address), None, None, None
        if refused is None:
            try:
                placed = replace(parameters, n_gpu_layers=n_gpu_layers)
                evicting, budget, goes_on = _evicting_cache(
                    weights, placed, settings or EvictionSettings(), window
                )
            except SettingsError as error:
                # only attaching shows some limits of a model; other errors are those of settings
                if not isinstance(error.__cause__, NativeError):
                    raise
                refused = str(error.__cause__)
        return ModelDescription(
            architecture=weights.architecture,
            n_layer=weights.n_layer,
            layers=layers,
            trained_context=trained,
            positions=_position_kind(weights.native.model),
            refused=refused,
            goes_on=goes_on,
            window=window,
            kv_type=kv_type,
            full=full,
            evicting=evicting,
            budget=budget,
        )


def _full_cache(
    weights: Weights, parameters: Parameters, window: int
) -> tuple[tuple[Layer, ...], CacheBytes | None]:
    """Return the layers, and the memory of the cache with evict=False."""
    check_full_window(weights, window)
    params = parameters.for_context(window)
    params.n_batch = params.n_ubatch = min(window, params.n_batch)
    check_memory(weights, ContextPlan(params, window, params.n_batch))
    with contextlib.closing(new_context(weights, params)) as context:
        at = address(context.ctx)
        found = [layer_of(at, number) for number in range(weights.n_layer)]
        layers = tuple(layer for layer in found if layer is not None)
        limits = full_cache(EvictionSettings(), window)
        cache = KVCache(at, 0, limits, evicting=False)
        is_known = cache.counters().n_layer > 0
        kv = cache.statistics(0)
    if kv.bytes_k and not kv.bytes_v:  # MLA: V is a part of K
        layers = tuple(replace(layer, head_size_v=0) for layer in layers)
    return layers, _bytes(kv) if is_known else None


def _evicting_cache(
    weights: Weights, parameters: Parameters, settings: EvictionSettings, window: int
) -> tuple[CacheBytes, Budget, bool]:
    """Return the memory of the cache of fixed size, its budget, and `goes_on`."""
    plan = plan_context(weights, parameters, settings, window)
    assert plan.budget is not None
    with contextlib.closing(new_context(weights, plan.params)) as context:
        at = address(context.ctx)
        budget = attach(at, plan.budget)
        cache = KVCache(at, 0, budget, evicting=True)
        return _bytes(cache.statistics(0)), budget, cache.position_limit == MAX_POSITIONS


def _bytes(kv: KVStatistics) -> CacheBytes:
    return CacheBytes(
        kv.cells, kv.bytes_k + kv.bytes_v, kv.bytes_window, kv.bytes_recurrent, kv.bytes_scores
    )


def _position_kind(model: Any) -> PositionKind:
    rope = llama_cpp.llama_model_rope_type(model)
    if learned_positions(address(model)) is not None:
        return "learned"
    if rope == llama_cpp.LLAMA_ROPE_TYPE_NONE:
        return "none"
    return "several per token" if rope in _SEVERAL_PER_TOKEN else "rotary"


def weights_of_layers(path: str | os.PathLike[str]) -> list[int]:
    """Return the bytes of each layer's weights, then of the output layer.

    Token embeddings stay in main memory, but a model with tied embeddings has a copy as output.
    """
    layers: dict[int, int] = {}
    output = embedding = 0
    has_output = False
    for name, size in _tensors(Path(path)):
        if found := _BLOCK.search(name):
            layers[int(found[1])] = layers.get(int(found[1]), 0) + size
        elif name.startswith("output"):
            output += size
            has_output = has_output or name == "output.weight"
        elif name == "token_embd.weight":
            embedding = size
    if not has_output:
        output += embedding
    return [*(layers.get(i, 0) for i in range(max(layers, default=-1) + 1)), output]


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    for each in files_of(path):
        with GgufFile(each) as file:
            for tensor in file.tensors():
                yield tensor.name, tensor.end - tensor.start
