"""What a model keeps of a text, and what that costs, found out without its weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import llama_cpp

from ..cache.kv_cache import MOST_POSITIONS, Counters, KVCache, Layer
from ..cache.loaded_model import learned_positions, least_cell_bytes, why_refused
from ..cache.settings import Budget, EvictionSettings
from ..errors import NativeError, SettingsError, UnsupportedModelError
from ..models.damage import LOGGER
from .model import Model, address
from .parameters import KV_TYPES, Parameters
from .text import Text

# The window where none is asked for, if the trained context is larger.
LARGEST_WINDOW_BY_DEFAULT = 32_768

# How a token's place in the text enters: rotations of queries and keys by one position or by
# several (M-RoPE), an embedding, or neither of them.
PositionKind = Literal["rotary", "several per token", "learned", "none"]

_SEVERAL_PER_TOKEN = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
# A ggml type that there is none of, whose rows take no memory.
_NO_ROWS = -1


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
        verbose: show llama.cpp's log.

    Raises:
        SettingsError: settings that make no sense for the window.
        ModelError: the file is missing or llama.cpp cannot read it.
    """
    found = _Found()
    evicting, budget, goes_on = None, None, None
    with _log_level_as_before():
        try:
            rows = KV_TYPES[kv_type]
            model = _Weightless(
                os.fspath(path),
                found,
                settings=settings,
                n_ctx=n_ctx,
                parameters=Parameters(type_k=rows, type_v=rows),
                verbose=verbose,
            )
        except UnsupportedModelError:
            assert found.refused is not None
        except SettingsError as error:
            # what only a context shows, and what these settings ask too much of
            if not isinstance(error.__cause__, NativeError):
                raise
            found.refused = str(error.__cause__)
        else:
            with contextlib.closing(model):
                text = Text(model)
                kv, budget = text.kv, model.budget
                goes_on = text.position_limit == MOST_POSITIONS
                evicting = CacheBytes(
                    kv.cells,
                    kv.bytes_k + kv.bytes_v,
                    kv.bytes_window,
                    kv.bytes_recurrent,
                    kv.bytes_scores,
                )
    return ModelDescription(
        **vars(found), goes_on=goes_on, kv_type=kv_type, evicting=evicting, budget=budget
    )


@dataclass
class _Found:
    """What is known before eviction may be refused: fields of ModelDescription."""

    architecture: str = ""
    n_layer: int = 0
    layers: tuple[Layer, ...] = field(default=())
    trained_context: int = 0
    positions: PositionKind = "none"
    refused: str | None = None
    window: int = 0
    full: CacheBytes | None = None


class _Weightless(Model):
    """A model and contexts that have sizes and no memory. Nothing must be evaluated.

    Args:
        found: is filled in when the model is known, before eviction is refused.
        **kwargs: as for `Model`.
    """

    def __init__(self, path: str, found: _Found, **kwargs: Any) -> None:
        self._found = found
        super().__init__(path, weights=False, **kwargs)

    def _open_context(self) -> None:
        native, found = self.native, self._found
        found.architecture = self.metadata.get("general.architecture", "")
        found.n_layer = self.n_layer
        found.trained_context = int(native.n_ctx_train())
        found.positions = _position_kind(native.model)
        found.refused = why_refused(address(native.model))
        self.window = self.window or min(found.trained_context, LARGEST_WINDOW_BY_DEFAULT)
        found.window = self.window
        self._check_full_window()
        self._look_at_full_cache()
        super()._open_context()

    def _look_at_full_cache(self) -> None:
        """Make the context that there would be with evict=False."""
        params = self.parameters.for_context(self.window)
        params.n_batch = params.n_ubatch = min(self.window, params.n_batch)
        self._check_memory(params)
        with contextlib.closing(self._new_context(params)) as context:
            kv = KVCache(address(context.ctx))
            layers = [kv.layer(number) for number in range(self._found.n_layer)]
            self._found.layers = tuple(layer for layer in layers if layer is not None)
            counters = kv.counters()
        if counters != Counters():
            self._found.full = CacheBytes(
                counters.n_cells,
                counters.size_k + counters.size_v,
                counters.size_window,
                counters.size_recurrent,
                0,
            )

    def _least_cell_bytes(self, params: Any) -> int:
        # what llama.cpp notes of the cells is really allocated
        return least_cell_bytes(address(self.native.model), _NO_ROWS, _NO_ROWS, offload=False)


def _position_kind(model: Any) -> PositionKind:
    rope = llama_cpp.llama_model_rope_type(model)
    if learned_positions(address(model)) is not None:
        return "learned"
    if rope == llama_cpp.LLAMA_ROPE_TYPE_NONE:
        return "none"
    return "several per token" if rope in _SEVERAL_PER_TOKEN else "rotary"


@contextlib.contextmanager
def _log_level_as_before() -> Iterator[None]:
    level = LOGGER.level
    try:
        yield
    finally:
        LOGGER.setLevel(level)
