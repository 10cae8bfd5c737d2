"""`Llama`: llama_cpp's class with a KV cache of fixed size."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ._library import use_own_library

use_own_library()

import llama_cpp

from . import completion
from .cache import FloatArray, IntArray, KVCache, check_model
from .errors import (
    ContextLimitError,
    EvictedError,
    ModelError,
    NativeError,
    PyH2OError,
    SettingsError,
)
from .settings import Budget, EvictionSettings, whole_blocks
from .statistics import KVStatistics
from .threads import physical_cores

# Types of the KV cache by the name users know them by, as ggml type numbers.
KV_TYPES: dict[str, int] = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
_QUANTIZED_KV_TYPES = (llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0)


@dataclass(frozen=True)
class HeavyHitter:
    """A token that is still in the cache, and the attention it collected.

    Attributes:
        token: its id.
        text: its text.
        position: its place in the text, from 0.
        score: attention collected, the mean over the (layer, KV head) pairs asked for; a pair that
            has evicted it counts as 0.
        rows: how many of those pairs still hold it.
    """

    token: int
    text: str
    position: int
    score: float
    rows: int


class Llama(llama_cpp.Llama):  # type: ignore[misc]  # llama_cpp is not typed
    """`llama_cpp.Llama` that evicts: a text of any length in a KV cache of fixed size.

    Everything that is not named here is as in the parent class. Prompts longer than `n_ctx` stream
    through the cache, and `max_tokens=None` generates until the model stops. Positions are the
    text's own, so a text ends where the context the model was trained on ends: with the finish
    reason "trained_context".

    Args:
        model_path: a GGUF file.
        hh: heavy rows: a fraction of `n_ctx` (float) or a token count (int).
        recent: recent rows, likewise.
        pinned: first positions that are never evicted (a count).
        slack: cells beyond the budget; None takes what costs no memory (see EvictionSettings).
        evict: False for the parent's full cache.
        n_ctx: the window, in tokens; 0 for the model's trained context.
        load_progress: called with 0 .. 1 while the model loads.
        prompt_progress: called with (tokens read, tokens in all) while a prompt is read.
        **kwargs: the parent's arguments.

    Raises:
        SettingsError: settings that make no sense.
        ModelError: the file is missing or llama.cpp cannot read it.
        UnsupportedModelError: the model's rows cannot be evicted; the message has the reason.
    """

    n_batch: int

    def __init__(
        self,
        model_path: str,
        *,
        hh: float | int = 0.1,
        recent: float | int = 0.1,
        pinned: int = 0,
        slack: int | None = None,
        evict: bool = True,
        n_ctx: int = 0,
        load_progress: Callable[[float], None] | None = None,
        prompt_progress: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self._settings = EvictionSettings(hh=hh, recent=recent, pinned=pinned, slack=slack)
        # Embedding contexts see each text once and in full: there is nothing to evict.
        self.evicting = evict and not kwargs.get("embedding") and not kwargs.get("vocab_only")
        self.prompt_progress = prompt_progress
        self._load_progress = load_progress
        self._window = n_ctx
        self._budget: Budget | None = None
        self._kv: KVCache | None = None
        self._stretches_rope = _stretches_rope(kwargs)

        _check_file(model_path)
        if n_ctx < 0:
            raise SettingsError(f"n_ctx is {n_ctx}: give a token count, or 0 for the model's own")
        for name in ("n_threads", "n_threads_batch"):
            kwargs[name] = kwargs.get(name) or physical_cores()
        if kwargs.get("type_v") in _QUANTIZED_KV_TYPES:
            # llama.cpp keeps a quantised V only in the layout of flash attention.
            kwargs["flash_attn"] = True
        # The parent sizes its batches by n_ctx; the real size of the cache is set once the model
        # is known, in _size_cache.
        n_ctx_parent = max(1, kwargs.get("n_batch", 512)) if self.evicting else n_ctx
        self._load_error: BaseException | None = None
        try:
            super().__init__(model_path, n_ctx=n_ctx_parent, **kwargs)
        except PyH2OError:
            raise
        except ValueError as error:
            if self._load_error is not None:
                raise self._load_error from None
            raise ModelError(_load_failure(model_path, error)) from error

        self._n_layer = int(llama_cpp.llama_model_n_layer(self.model))
        self._kv = KVCache(_address(self.ctx))
        if self.evicting:
            self._start_evicting()
        else:
            self._window = super().n_ctx()
            self.position_limit = self._window
        if self.verbose:
            kv = self.kv
            print(f"pyh2o: {kv.summary()}\npyh2o: {kv.details()}", file=sys.stderr)

    # ---------------------------------------------------------------------------------------------
    # Set-up
    # ---------------------------------------------------------------------------------------------

    # The parent loads the model and creates the context in one go, with no hook in between. These
    # two attributes are what it sets at the right moments.

    @property
    def model_params(self) -> Any:
        """The parameters the model is loaded with."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._model_params = params
        if self._load_progress is not None:
            report = self._load_progress

            def on_progress(fraction: float, _user_data: Any) -> bool:
                try:
                    report(fraction)
                except BaseException as error:
                    # No exception can pass through llama.cpp: stop the loading, and raise it after.
                    self._load_error = error
                return self._load_error is None

            # ctypes does not keep the callback alive by itself
            self._progress_callback = llama_cpp.llama_progress_callback(on_progress)
            params.progress_callback = self._progress_callback

    @property
    def _model(self) -> Any:
        return self._loaded_model

    @_model.setter
    def _model(self, model: Any) -> None:
        self._loaded_model = model
        if self.evicting:
            self._size_cache()

    def _size_cache(self) -> None:
        """Between loading the model and creating the context: so many cells, and no more."""
        check_model(_address(self._loaded_model.model))
        trained = self._loaded_model.n_ctx_train()
        self._window = self._window or trained
        self.position_limit = max(trained, self._window) if self._stretches_rope else trained
        self._budget = self._settings.resolve(self._window)
        self.context_params.n_ctx = self._budget.cells
        # llama.cpp aborts on a batch that is larger than its cache
        self.n_batch = min(self.n_batch, self._budget.cells)
        self.context_params.n_batch = self.n_batch
        # no more tokens than fit the slack are computed at once: reserve no memory for more
        self.context_params.n_ubatch = min(self.context_params.n_ubatch, self._budget.slack)

    def _start_evicting(self) -> None:
        assert self._kv is not None
        assert self._budget is not None
        try:
            self._kv.attach(self._budget)
        except NativeError as error:
            self.close()
            raise SettingsError(f"eviction cannot start: {error}") from error
        # From here on the parent's limits are those of the positions, not of the cells.
        self._n_ctx = self.position_limit
        self.input_ids = np.empty(self.position_limit, dtype=np.intc)
        if self._logits_all:
            self.scores = np.empty((self.position_limit, self._n_vocab), dtype=np.single)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        settings = self._settings
        state.update(
            n_ctx=self._window,
            hh=settings.hh,
            recent=settings.recent,
            pinned=settings.pinned,
            slack=settings.slack,
            evict=self.evicting,
        )
        return state

    def close(self) -> None:
        """Free the model and the cache."""
        # The parent closes again when the object goes, even if its set-up never began.
        if hasattr(self, "_stack"):
            super().close()

    # ---------------------------------------------------------------------------------------------
    # The cache
    # ---------------------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """The window, in tokens: the context that was asked for."""
        return self._window or int(super().n_ctx())

    @property
    def kv(self) -> KVStatistics:
        """What the KV cache holds now and what it costs."""
        assert self._kv is not None
        counters = self._kv.counters()
        cells = counters.n_cells or self._window
        whole = Budget(window=self._window, heavy=0, recent=cells, pinned=0, slack=0)
        budget = self._budget or whole
        return KVStatistics(
            evicting=self.evicting,
            window=self._window,
            position=self.n_tokens,
            position_limit=self.position_limit,
            cells=cells,
            used=counters.n_used if counters.n_cells else self.n_tokens,
            capacity=budget.capacity,
            budget=budget.rows,
            heavy=budget.heavy,
            recent=budget.recent,
            pinned=budget.pinned,
            slack=budget.slack,
            compactions=counters.n_compactions,
            tokens_evicted=counters.n_cells_freed,
            rows_evicted=counters.n_rows_evicted,
            rows_moved=counters.n_rows_moved,
            compaction_seconds=counters.t_compactions_us / 1e6,
            bytes_k=counters.size_k,
            bytes_v=counters.size_v,
            bytes_scores=counters.size_scores,
            bytes_full=(counters.size_k + counters.size_v) // cells * whole_blocks(self._window),
        )

    def kv_rows(self, layer: int) -> tuple[IntArray, FloatArray]:
        """Token positions and scores of the rows that one layer holds, in the order of the text.

        Args:
            layer: from 0.

        Returns:
            positions [n_head_kv, kv.used], ascending for each KV head, and scores, same shape. A
            score is the attention collected so far: sum over queries, mean over the query heads of
            the KV group.

        Raises:
            NativeError: no such layer, or the cache does not evict and so keeps no scores.
        """
        assert self._kv is not None
        return self._kv.rows(layer)

    def heavy_hitters(
        self, n: int = 20, *, layer: int | None = None, head: int | None = None
    ) -> list[HeavyHitter]:
        """The tokens in the cache that collected most attention, highest first.

        Args:
            n: how many.
            layer: only this layer; None for all.
            head: only this KV head; None for all.

        Raises:
            NativeError: no such layer, or the cache does not evict and so keeps no scores.
            IndexError: no such KV head.
        """
        score = np.zeros(self.n_tokens, dtype=np.float64)
        rows = np.zeros(self.n_tokens, dtype=np.int64)
        pairs = 0
        for each in range(self._n_layer) if layer is None else [layer]:
            positions, scores = self.kv_rows(each)
            if head is not None:
                positions, scores = positions[[head]], scores[[head]]
            pairs += len(positions)
            np.add.at(score, positions.ravel(), scores.ravel())
            np.add.at(rows, positions.ravel(), 1)
        held = np.flatnonzero(rows)
        best = held[np.argsort(-score[held], kind="stable")][:n]
        return [self._heavy_hitter(int(pos), score[pos] / pairs, int(rows[pos])) for pos in best]

    def _heavy_hitter(self, position: int, score: float, rows: int) -> HeavyHitter:
        token = int(self.input_ids[position])
        text = self.detokenize([token], special=True).decode("utf-8", errors="replace")
        return HeavyHitter(token, text, position, float(score), rows)

    # ---------------------------------------------------------------------------------------------
    # Text
    # ---------------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` there are.

        Raises:
            ContextLimitError: they need positions the model was not trained for.
            EvictedError: `n_tokens` was set back to where rows have been evicted.
        """
        if self.evicting:
            self._check_positions(len(tokens))
            if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
                raise EvictedError(
                    f"cannot go back to {self.n_tokens} tokens: rows before that were evicted; "
                    "call reset() and evaluate the text again"
                )
        for start in range(0, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            super().eval(chunk)
            if self.prompt_progress is not None and len(tokens) > 1:
                self.prompt_progress(start + len(chunk), len(tokens))

    def _check_positions(self, n_new: int) -> None:
        if self.n_tokens + n_new > self.position_limit:
            raise ContextLimitError(
                f"{self.n_tokens + n_new} tokens need more positions than the "
                f"{self.position_limit} the model was trained for: shorten the text, or use a "
                "model with a longer context"
            )

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """The parent's generator of tokens; it ends where the model's positions end."""
        generator = super().generate(tokens, *args, **kwargs)
        if not self.evicting:
            yield from generator
            return
        sent: Sequence[int] | None = None
        while True:
            try:
                token = generator.send(sent)
            except StopIteration:
                return
            sent = yield token
            # the token itself is evaluated next, and what was sent after it
            if self.n_tokens + 1 + len(sent or ()) > self.position_limit:
                return

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return completion.complete(
            self,
            completion.CompletionRequest(*args, **kwargs),
            position_limit=self.position_limit,
            evicting=self.evicting,
        )

    def save_state(self) -> Any:
        """The parent's state of a full cache.

        Raises:
            EvictedError: the cache evicts; its rows do not fit llama.cpp's state format.
        """
        if self.evicting:
            raise EvictedError(
                "a cache that evicts cannot be saved yet: keep the text and evaluate it again, or "
                "use evict=False"
            )
        return super().save_state()

    def load_state(self, state: Any) -> None:
        """Load the parent's state of a full cache.

        Raises:
            EvictedError: the cache evicts; its rows do not fit llama.cpp's state format.
        """
        if self.evicting:
            raise EvictedError("a state of a full cache cannot be loaded into one that evicts")
        super().load_state(state)


def _address(pointer: Any) -> int:
    """The address in a ctypes pointer or integer."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


def _stretches_rope(settings: dict[str, Any]) -> bool:
    """Whether the user scales positions, and so vouches for a window beyond the trained one."""
    unscaled = (
        None,
        llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
        llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    )
    return bool(
        settings.get("rope_scaling_type") not in unscaled
        or settings.get("rope_freq_base")
        or settings.get("rope_freq_scale")
    )


def _check_file(model_path: str) -> None:
    path = Path(model_path)
    if not path.exists():
        raise ModelError(f"there is no model file {model_path}: check the path")
    if not path.is_file():
        raise ModelError(f"{model_path} is not a file: give the path of a GGUF file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{model_path} is not a GGUF file: convert the model to GGUF first")


def _load_failure(model_path: str, error: ValueError) -> str:
    if "context" in str(error):
        return (
            f"llama.cpp cannot create a context for {model_path}: too little memory, or a cache "
            "type that does not fit the model's head size; verbose=True (--verbose) shows its log"
        )
    return (
        f"llama.cpp cannot load {model_path}: the file is damaged or of an unknown architecture; "
        "verbose=True (--verbose) shows its log"
    )
