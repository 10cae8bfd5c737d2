"""What a model keeps of a text, and what that costs, found out without its weights."""

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

# The window where none is asked for, if the trained context is larger.
LARGEST_WINDOW_BY_DEFAULT = 32_768

# How a token's place in the text enters: rotations of queries and keys by one position or by
# several (M-RoPE), an embedding, or neither of them.
PositionKind = Literal["rotary", "several per token", "learned", "none"]

_SEVERAL_PER_TOKEN = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


@dataclass(frozen=True)
class CacheBytes:
    """The memory of one cache.

    Attributes:
        cells: of the layers that grow with the text.
        growing: bytes of their K and V.
        window: bytes of K and V of layers that see a window.
        recurrent: bytes of the states of recurrent layers.
        scores: bytes of what the policy collects; 0 for the full cache.
    """

    cells: int
    growing: int
    window: int
    recurrent: int
    scores: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.growing + self.window + self.recurrent + self.scores


@dataclass(frozen=True)
class ModelDescription:
    """What is known of a model that was not loaded.

    Attributes:
        architecture: as the file has it.
        n_layer: layers.
        layers: what each keeps; empty if the memory is of a kind that is not known here.
        trained_context: tokens.
        positions: how a token's place in the text enters.
        refused: why its cache cannot be evicted, in one line; None if it can.
        goes_on: whether a text goes on beyond the trained context; None if `refused`.
        window: tokens that the cache is for.
        kv_type: of the rows.
        full: what the full cache takes; None if that is not known.
        evicting: what the cache of fixed size takes; None if `refused`.
        budget: its settings and what they come to; None if `refused`.
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
        """What a text that is as long as the window takes on a GPU.

        If `refused`, only the sizes of the full cache mean something.

        Raises:
            SettingsError: settings that make no sense for this window.
        """
        budget = full_cache(EvictionSettings(), n_tokens)
        if self.budget is not None:
            budget = self.budget.settings.resolve(n_tokens, self.budget.n_pos, on_gpu=True)
        recurrent = self.full.recurrent if self.full else 0
        return text_bytes(self.layers, budget, kv_type=self.kv_type, recurrent=recurrent)

    def record(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
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
    """Find out what a model keeps of a text; no weights are read.

    llama.cpp reads the file's description of the model, and makes the contexts that it would make
    of it without taking their memory. So the sizes are its own.

    Args:
        path: a GGUF file.
        settings: what would be kept; None for the default.
        n_ctx: the window, in tokens; 0 for the trained context, `LARGEST_WINDOW_BY_DEFAULT` at
            most.
        kv_type: of the rows: a key of `KV_TYPES`.
        n_gpu_layers: that the budget is for.
        verbose: show llama.cpp's log.

    Raises:
        SettingsError: settings that make no sense for the window.
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
                # what only a context shows, and what these settings ask too much of
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
    """What each layer keeps, and what the context takes that there would be with evict=False."""
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
    if kv.bytes_k and not kv.bytes_v:  # latent rows, of which V is a part
        layers = tuple(replace(layer, head_size_v=0) for layer in layers)
    return layers, _bytes(kv) if is_known else None


def _evicting_cache(
    weights: Weights, parameters: Parameters, settings: EvictionSettings, window: int
) -> tuple[CacheBytes, Budget, bool]:
    """What the cache of fixed size takes, its budget, and whether a text goes on in it."""
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
    """Bytes of the weights of each layer, and behind them of the output.

    What looks tokens up stays in main memory; a model without an output of its own has a copy.

    Raises:
        ModelError: a file of the model cannot be read.
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
    """Names and bytes of the tensors in all files of a model."""
    for each in files_of(path):
        with GgufFile(each) as file:
            for tensor in file.tensors():
                yield tensor.name, tensor.end - tensor.start
