"""`Llama`: llama_cpp's class with a KV cache of fixed size."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_tokenizer import LlamaTokenizer

from .cache.kv_cache import ERR_PIN, FloatArray, IntArray, KVCache, check_model, check_state_version
from .cache.rows import kept_tokens
from .cache.settings import (
    DEFAULT_POLICY,
    Attention,
    Budget,
    EvictionSettings,
    Positions,
    Prefill,
    whole_blocks,
)
from .cache.statistics import KVStatistics
from .errors import (
    ContextLimitError,
    EvictedError,
    ModelError,
    NativeError,
    PyH2OError,
    SettingsError,
    StateError,
)
from .generation.drafts import FittingDrafts
from .generation.grammar import GrammarGuard, GuardedSampler
from .openai import completion
from .openai.chat import OpenAIChat, as_json_object
from .policies import Policy, parse_policy
from .system.devices import has_own_kernels, why_no_gpu
from .system.threads import physical_cores
from .text.detokenizer import PieceDetokenizer, detokenize

# Programs may put the class below in the place of this one.
StockLlama = llama_cpp.Llama

# Types of the KV cache by the name users know them by, as ggml type numbers.
KV_TYPES: dict[str, int] = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
STATE_MISFIT = "the state does not fit: it is damaged, or of another model or other settings"

_QUANTIZED_KV_TYPES = (llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0)

# Place of `reset` among the parent's positional arguments of `generate`, after the tokens.
RESET_ARGUMENT = 6
# llama_cpp uses one sequence.
SEQUENCE = 0
# Tokens of the text that are made room for at once.
FIRST_RECORD = 4096


@dataclass(frozen=True)
class HeavyHitter:
    """A token that is still in the cache, and what it is worth to the policy.

    Attributes:
        token: its id.
        text: its text.
        position: its place in the text, from 0.
        score: of its rows (see `Llama.kv_rows`), the mean over the (layer, KV head) pairs asked
            for; a pair that has evicted it counts as 0.
        rows: how many of those pairs still hold it.
    """

    token: int
    text: str
    position: int
    score: float
    rows: int


class EvictingState(llama_cpp.LlamaState):  # type: ignore[misc]
    """A state with the rows that eviction keeps, which has a format of its own."""


class Llama(llama_cpp.Llama):  # type: ignore[misc]  # llama_cpp is not typed
    """`llama_cpp.Llama` that evicts: a text of any length in a KV cache of fixed size.

    Everything that is not named here is as in the parent class. Prompts longer than `n_ctx` stream
    through the cache, and `max_tokens=None` generates until the model stops. When the positions
    that the model was trained on are used up, the rows in the cache are given new ones. A few
    models do not allow that (`position_limit` is then the trained context): their texts end there,
    with the finish reason "trained_context".

    Args:
        model_path: a GGUF file.
        hh: heavy rows: a fraction of `n_ctx` (float) or a token count (int).
        recent: recent rows, likewise.
        pinned: first positions that are never evicted (a count).
        slack: cells beyond the budget; None is a twentieth of it (see EvictionSettings).
        policy: what makes a row worth keeping: a policy of `pyh2o.policies`, or its text, such as
            "snap:queries=32".
        positions: "original" or "dense", for the rotary embeddings (see EvictionSettings).
        attention: what computes attention and scores (see EvictionSettings).
        prefill: "stream" or "exact", for a text that is longer than the cache (see
            EvictionSettings).
        prefill_mib: most MiB that an exact prefill may take; None for what it needs.
        evict: False for the parent's full cache.
        n_ctx: the window, in tokens; 0 for the model's trained context.
        load_progress: called with 0 .. 1 while the model loads.
        prompt_progress: called with (tokens read, tokens in all) while a prompt is read.
        on_exact_prefill: called with (tokens to read, bytes) before an exact prefill takes so much
            memory; without it `verbose` prints that.
        **kwargs: the parent's arguments.

    Raises:
        SettingsError: settings that make no sense.
        ModelError: the file is missing or llama.cpp cannot read it.
        UnsupportedModelError: the model's rows cannot be evicted; the message has the reason.

    Attributes:
        evicting: whether rows are evicted.
        position_limit: most tokens of a text; 2**31 - 1 where positions are re-based.
    """

    # The parent sets these.
    n_batch: int
    n_tokens: int
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]

    def __init__(
        self,
        model_path: str,
        *,
        hh: float | int = 0.1,
        recent: float | int = 0.1,
        pinned: int = 0,
        slack: int | None = None,
        policy: str | Policy = DEFAULT_POLICY,
        positions: Positions = "original",
        attention: Attention = "auto",
        prefill: Prefill = "stream",
        prefill_mib: int | None = None,
        evict: bool = True,
        n_ctx: int = 0,
        load_progress: Callable[[float], None] | None = None,
        prompt_progress: Callable[[int, int], None] | None = None,
        on_exact_prefill: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self._settings = EvictionSettings(
            hh=hh,
            recent=recent,
            pinned=pinned,
            slack=slack,
            policy=parse_policy(policy),
            positions=positions,
            attention=attention,
            prefill=prefill,
            prefill_mib=prefill_mib,
        )
        # Embedding contexts see each text once and in full: there is nothing to evict.
        self.evicting = evict and not kwargs.get("embedding") and not kwargs.get("vocab_only")
        self.prompt_progress = prompt_progress
        self._on_exact_prefill = on_exact_prefill
        self._load_progress = load_progress
        self._window = n_ctx
        self._budget: Budget | None = None
        self._kv: KVCache | None = None
        self._stretches_rope = _stretches_rope(kwargs)

        check_file(model_path)
        if n_ctx < 0:
            raise SettingsError(f"n_ctx is {n_ctx}: give a token count, or 0 for the model's own")
        for name in ("n_threads", "n_threads_batch"):
            kwargs[name] = kwargs.get(name) or physical_cores()
        on_cpu = not kwargs.get("n_gpu_layers")
        if not on_cpu and (missing := why_no_gpu()):
            on_cpu = True
            warnings.warn(missing, RuntimeWarning, stacklevel=2)
        if kwargs.get("type_v") in _QUANTIZED_KV_TYPES:
            # llama.cpp keeps a quantised V only in the layout of flash attention.
            kwargs["flash_attn"] = True
        elif self.evicting and attention != "ops" and (on_cpu or has_own_kernels()):
            # So does our own attention.
            kwargs.setdefault("flash_attn", True)
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
        n_pos = max(trained, self._window) if self._stretches_rope else trained
        self._budget = self._settings.resolve(self._window, n_pos)
        self.context_params.n_ctx = self._budget.cells
        # llama.cpp aborts on a batch that is larger than its cache
        self.n_batch = min(self.n_batch, self._budget.cells)
        # no more tokens than fit the slack are computed at once: reserve no memory for more, and
        # leave no small rest of each batch, which would cost a compaction of its own
        n_ubatch = min(self.context_params.n_ubatch, self._budget.slack)
        if self.n_batch > n_ubatch:
            self.n_batch -= self.n_batch % n_ubatch
        self.context_params.n_batch = self.n_batch
        self.context_params.n_ubatch = n_ubatch

    def _start_evicting(self) -> None:
        assert self._kv is not None
        assert self._budget is not None
        try:
            self._kv.attach(self._budget)
        except NativeError as error:
            self.close()
            raise SettingsError(f"eviction cannot start: {error}") from error
        # From here on the parent's limits are those of the positions, not of the cells. Programs
        # that read these parameters want to know how much text they can give.
        self.context_params.n_ctx = self._window
        self.position_limit = self._kv.counters().pos_limit
        self._n_ctx = self.position_limit
        self._grow_record(0)

    @property
    def settings(self) -> EvictionSettings:
        """What was asked for."""
        return self._settings

    @property
    def budget(self) -> Budget | None:
        """The settings and what they come to for the window; None for the full cache."""
        return self._budget

    @property
    def draft_model(self) -> Any:
        """Guesses how the text goes on, for speculative decoding; None for none."""
        return self._draft_model

    @draft_model.setter
    def draft_model(self, model: Any) -> None:
        self._draft_model = None if model is None else FittingDrafts(model, self)

    def room_in_batch(self) -> int:
        """Tokens that can be evaluated at once without a compaction."""
        if self._budget is None:
            return self.n_batch
        assert self._kv is not None
        return min(self.n_batch, self._budget.capacity - self._kv.counters().n_used)

    def _grow_record(self, n_tokens: int) -> None:
        """Let the parent's record of the text hold so many tokens, and what a draft model adds.

        It grows by half at a time, so that a token costs the same however long the text is.
        """
        n_least = n_tokens + self.n_batch
        if n_least <= len(self.input_ids):
            return
        n_new = max(n_least, len(self.input_ids) * 3 // 2, FIRST_RECORD)
        self.input_ids = _grown(self.input_ids, n_new)
        if self._logits_all:
            self.scores = _grown(self.scores, n_new)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.update(
            vars(self._settings),
            n_ctx=self._window,
            evict=self.evicting,
            draft_model=self._draft_model and self._draft_model.model,
        )
        return state

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
    def device_bytes(self) -> int:
        """Memory of GPUs that weights, caches and work space take."""
        assert self._kv is not None
        return self._kv.device_bytes()

    @property
    def kv(self) -> KVStatistics:
        """What the KV cache holds now and what it costs."""
        assert self._kv is not None
        counters = self._kv.counters()
        cells = counters.n_cells or self._window
        unpinned = replace(self._settings, pinned=0)
        whole = Budget(unpinned, window=self._window, heavy=0, recent=cells, slack=0)
        return KVStatistics(
            evicting=self.evicting,
            limits=self._budget or whole,
            position=self.n_tokens,
            position_limit=self.position_limit,
            cells=cells,
            used=counters.n_used if counters.n_cells else self.n_tokens,
            pinned=counters.n_pinned,
            compactions=counters.n_compactions,
            tokens_evicted=counters.n_cells_freed,
            rows_evicted=counters.n_rows_evicted,
            rows_moved=counters.n_rows_moved,
            compaction_seconds=counters.t_compactions_us / 1e6,
            rebases=counters.n_rebases,
            rebase_seconds=counters.t_rebases_us / 1e6,
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
            score is the attention collected so far (sum over queries, mean over the query heads of
            the KV group), less what the policy has forgotten of it. For a policy that does not look
            at that it is what the policy gave the row at the last compaction, and 0 for a row that
            is newer or did not compete.

        Raises:
            NativeError: no such layer, or the cache does not evict and so keeps no scores.
        """
        assert self._kv is not None
        return self._kv.rows(layer)

    def heavy_hitters(
        self, n: int = 20, *, layer: int | None = None, head: int | None = None
    ) -> list[HeavyHitter]:
        """The tokens in the cache with the highest scores (see `kv_rows`), highest first.

        Args:
            n: how many.
            layer: only this layer; None for all.
            head: only this KV head; None for all.

        Raises:
            NativeError: no such layer, or the cache does not evict and so keeps no scores.
            IndexError: no such KV head.
        """
        self.kv_rows(0 if layer is None else layer)  # refuses where there are no scores
        kept = kept_tokens(self, layer=layer, head=head)
        return [
            self._heavy_hitter(int(kept.positions[i]), kept.scores[i], int(kept.rows[i]))
            for i in kept.heaviest(n)
        ]

    def _heavy_hitter(self, position: int, score: float, rows: int) -> HeavyHitter:
        token = int(self.input_ids[position])
        text = self.detokenize([token], special=True).decode("utf-8", errors="replace")
        return HeavyHitter(token, text, position, float(score), rows)

    # ---------------------------------------------------------------------------------------------
    # Text
    # ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the text and the cache."""
        super().reset()
        memory = llama_cpp.llama_get_memory(self.ctx)
        if memory is not None:
            llama_cpp.llama_memory_clear(memory, False)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` there are.

        Raises:
            ContextLimitError: they need more positions than there are.
            EvictedError: `n_tokens` was set back to where rows have been evicted.
            SettingsError: an exact prefill needs more memory than `prefill_mib`, or than there is,
                or more positions than the model was trained on; nothing has been read.
        """
        if self.evicting:
            self._check_positions(len(tokens))
            self._grow_record(self.n_tokens + len(tokens))
            if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
                raise EvictedError(
                    f"cannot go back to {self.n_tokens} tokens: rows before that were evicted; "
                    "call reset() and evaluate the text again"
                )
        with self._room_for(len(tokens)):
            for start in range(0, len(tokens), self.n_batch):
                chunk = tokens[start : start + self.n_batch]
                super().eval(chunk)
                if self.prompt_progress is not None and len(tokens) > 1:
                    self.prompt_progress(start + len(chunk), len(tokens))

    @contextlib.contextmanager
    def _room_for(self, n_new: int) -> Iterator[None]:
        """For an exact prefill: as many cells as it takes, for a while."""
        if not self.evicting or self._settings.prefill == "stream" or n_new == 1:
            yield
            return
        assert self._kv is not None
        assert self._budget is not None
        n_rows = self._kv.counters().n_used + n_new
        if n_rows <= self._budget.capacity:
            yield
            return
        # a small slack may leave cells unused, but a larger cache has more of them in any case
        n_cells = whole_blocks(max(n_rows, self._budget.cells + 1))
        n_bytes = self._check_exact_prefill(n_new, n_cells)
        if self._on_exact_prefill is not None:
            self._on_exact_prefill(n_new, n_bytes)
        elif self.verbose:
            print(
                f"pyh2o: an exact prefill of {n_new} tokens takes {_mib(n_bytes)} MiB until then",
                file=sys.stderr,
            )
        try:
            self._kv.enlarge(n_cells)
        except NativeError as error:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {_mib(n_bytes)} MiB, which cannot be "
                f"had: {error}; use prefill='stream' (--prefill stream)"
            ) from error
        try:
            yield
        finally:
            self._kv.shrink()

    def _check_exact_prefill(self, n_new: int, n_cells: int) -> int:
        """The bytes of a larger cache, if it may be taken."""
        assert self._budget is not None
        kv = self.kv
        n_bytes = kv.bytes_total // kv.cells * n_cells
        most = self._settings.prefill_mib
        if most is not None and n_bytes > most * 2**20:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {_mib(n_bytes)} MiB, more than the "
                f"{most} allowed: raise prefill_mib (--prefill-mib), or use prefill='stream' "
                "(--prefill stream)"
            )
        if kv.used + n_new > self._budget.n_pos:
            raise SettingsError(
                f"an exact prefill of {n_new} tokens needs {kv.used + n_new} rows, more than the "
                f"{self._budget.n_pos} positions the model was trained on: use prefill='stream' "
                "(--prefill stream)"
            )
        return n_bytes

    def _check_positions(self, n_new: int) -> None:
        if self.n_tokens + n_new > self.position_limit:
            raise ContextLimitError(
                f"{self.n_tokens + n_new} tokens need more than the {self.position_limit} "
                "positions this model can use: shorten the text, or use a model with a longer "
                "context"
            )

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Whether the text can be set back to its first `n_tokens` tokens exactly."""
        assert self._kv is not None
        if not self.evicting or n_tokens in (0, self.n_tokens):
            return True
        return n_tokens >= self._kv.counters().pos_removable

    def remove_tail(self, n_tokens: int) -> bool:
        """Set the text back to its first `n_tokens` tokens, if all their rows are still there.

        At least one token has to be evaluated before the next one can be drawn.

        Returns:
            False if rows were evicted that the shorter text would still have; nothing is changed.

        Raises:
            ValueError: the text is shorter than that.
        """
        if not 0 <= n_tokens <= self.n_tokens:
            raise ValueError(f"the text has {self.n_tokens} tokens, not {n_tokens}")
        if not self.can_remove_tail(n_tokens):
            return False
        if n_tokens < self.n_tokens and self._ctx.kv_cache_seq_rm(-1, n_tokens, -1):
            self.n_tokens = n_tokens
            self._requires_eval = True
        return self.n_tokens == n_tokens

    def drop_surplus(self) -> bool:
        """Drop rows of an evaluation that Ctrl-C broke off before its tokens were recorded.

        Returns:
            False if rows of the text were evicted for it, or if there is no text: call reset().
        """
        return self.n_tokens > 0 and bool(self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1))

    def pin(self, n_tokens: int) -> None:
        """Never evict the first tokens of this text, from now on until it is cleared.

        They take the places of heavy rows; the budget stays the same. Without eviction this does
        nothing.

        Raises:
            SettingsError: there are not so many pinned and heavy rows.
        """
        if self._kv is None or not self.evicting:
            return
        with self._refusing(f"{n_tokens} tokens to pin"):
            self._kv.pin(n_tokens)

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Never evict these tokens either, from now on until the text is cleared.

        They take the places of heavy rows. They may be tokens to come; rows that are evicted
        already do not come back. Without eviction this does nothing.

        Args:
            spans: (start, end) positions, end not included; ascending and apart. They take the
                place of spans given before.

        Raises:
            SettingsError: they are out of order, or more than the pinned and heavy rows.
        """
        if self._kv is None or not self.evicting:
            return
        n_tokens = sum(max(0, end - start) for start, end in spans)
        with self._refusing(f"spans of {n_tokens} tokens to pin"):
            self._kv.pin_spans(spans)

    def share_fairly(self, starts: Sequence[int]) -> None:
        """Give each part of the text its share of the heavy rows, until the text is cleared.

        The share is that of the part's tokens; within a part the best scores stay. A part that has
        fewer rows than its share leaves the rest to the others. That is the fair eviction of "The
        Pitfalls of KV Cache Compression" (arXiv 2510.00231) for any number of parts, and it goes
        together with pinned tokens, which the authors' code does not. The scores themselves stay
        what they are: attention across the parts counts. Without eviction this does nothing.

        Args:
            starts: positions above 0 where the text is cut, ascending; none for one part.

        Raises:
            SettingsError: they are out of order.
        """
        if self._kv is None or not self.evicting:
            return
        with self._refusing("starts of parts of the text"):
            self._kv.share_fairly(starts)

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Say what the native library refuses, and what would help."""
        try:
            yield
        except NativeError as error:
            if error.code != ERR_PIN:
                raise SettingsError(f"{what}: {error}") from error
            kv = self.kv
            raise SettingsError(
                f"{what} do not fit the {kv.budget - kv.recent} rows that are not recent: raise hh "
                "(--hh), or pin fewer"
            ) from error

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """The parent's generator of tokens; it ends at `position_limit`.

        What is in the cache and begins the prompt is not read again, but for text whose rows would
        be others now if what comes after it had never been there.
        """
        reset = args[RESET_ARGUMENT] if len(args) > RESET_ARGUMENT else kwargs.get("reset", True)
        if self.evicting and reset:
            self._reset_if_inexact(tokens)
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

    def _reset_if_inexact(self, tokens: Sequence[int]) -> None:
        """Clear a text that goes on otherwise than the prompt, if a compaction saw how."""
        assert self._kv is not None
        assert self._budget is not None
        n_both = min(self.n_tokens, len(tokens))
        differ = np.flatnonzero(self.input_ids[:n_both] != np.asarray(tokens[:n_both]))
        n_common = int(differ[0]) if differ.size else n_both
        if n_common == self.n_tokens:
            return
        removable = self._kv.counters().pos_removable
        # The last compaction took place behind this many tokens: all but one of its recent rows
        # can be removed.
        n_seen = removable + self._budget.recent - 1
        if removable > 0 and min(n_common, len(tokens) - 1) < n_seen:
            self.reset()

    def _init_sampler(
        self, *args: Any, grammar: Any = None, logits_processor: Any = None, **kwargs: Any
    ) -> Any:
        """The parent's; a grammar that cannot be read or followed is refused (`GrammarError`)."""
        if grammar is None:
            return super()._init_sampler(*args, logits_processor=logits_processor, **kwargs)
        guard = GrammarGuard(self, grammar)
        processors = [*(logits_processor or []), guard.mask]
        sampler = super()._init_sampler(*args, logits_processor=processors, **kwargs)
        return GuardedSampler(sampler, guard)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's chat; `response_format` may also be of OpenAI's type "json_schema"."""
        if "response_format" in kwargs:
            kwargs["response_format"] = as_json_object(kwargs["response_format"])
        return StockLlama.create_chat_completion(self, *args, **kwargs)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's; the finish reason "trained_context", unknown to OpenAI, is "length"."""
        chat = OpenAIChat(self)
        return StockLlama.create_chat_completion_openai_v1(chat, *args, **kwargs)

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The text of tokens; those of more than 32 bytes have one, too, unlike in the parent."""
        if type(self.tokenizer_) is not LlamaTokenizer:
            text: bytes = super().detokenize(tokens, prev_tokens, special)
            return text
        vocab, bos = self._model.vocab, self.token_bos()
        parts = PieceDetokenizer(vocab, bos, starts_text=False, special=special)
        return detokenize(parts, tokens)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return completion.complete(
            self,
            completion.CompletionRequest(*args, **kwargs),
            position_limit=self.position_limit,
            evicting=self.evicting,
        )

    # ---------------------------------------------------------------------------------------------
    # States
    # ---------------------------------------------------------------------------------------------

    def kv_state(self) -> bytes:
        """All that the KV cache holds: rows, scores, whose row lies where, counters.

        Raises:
            StateError: an evaluation was broken off, and rows were evicted for it.
        """
        # Ctrl-C can leave rows of tokens that are not in the record.
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            raise StateError(
                "an evaluation was broken off, and rows were evicted for it: call reset() and "
                "evaluate the text again"
            )
        size = llama_cpp.llama_state_seq_get_size(self.ctx, SEQUENCE)
        data = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(self.ctx, data, size, SEQUENCE)
        if written != size:
            raise StateError("llama.cpp could not save the KV cache: verbose=True shows its log")
        return bytes(data)

    def load_kv_state(self, data: bytes, tokens: Sequence[int] | IntArray) -> None:
        """Put back what `kv_state` returned: the text goes on from there, bit for bit.

        At least one token has to be evaluated before the next one can be drawn.

        Args:
            data: from `kv_state` of a `Llama` of the same model and settings.
            tokens: the text; [n_tokens].

        Raises:
            StateError: another model, other settings, damaged data, or not the tokens' state. The
                text and the cache are then empty.
            StateVersionError: a state of another version of pyh2o, likewise.
        """
        self.reset()
        if self.evicting:
            check_state_version(data)
        source = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        read = llama_cpp.llama_state_seq_set_data(self.ctx, source, len(data), SEQUENCE)
        memory = llama_cpp.llama_get_memory(self.ctx)
        newest = llama_cpp.llama_memory_seq_pos_max(memory, SEQUENCE)
        if read != len(data) or newest != len(tokens) - 1:
            self.reset()
            raise StateError(STATE_MISFIT)
        if self.evicting:
            self._grow_record(len(tokens))
        self.input_ids[: len(tokens)] = tokens
        self.n_tokens = len(tokens)
        self._requires_eval = True

    def save_state(self) -> llama_cpp.LlamaState:
        """The parent's state, with all that eviction has to remember."""
        if not self.evicting:
            return super().save_state()
        data = self.kv_state()
        n_logits = self.n_tokens if self._logits_all else 0
        return EvictingState(
            input_ids=self._input_ids.copy(),
            scores=self.scores[:n_logits].copy(),
            n_tokens=self.n_tokens,
            llama_state=data,
            llama_state_size=len(data),
            seed=self._seed,
        )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Load what `save_state` returned.

        Raises:
            StateError: another model, other settings, or damaged data.
        """
        # llama.cpp must not even try to read the other format: it takes any bytes for sizes.
        if isinstance(state, EvictingState) != self.evicting:
            raise StateError(STATE_MISFIT)
        if not self.evicting:
            self._load_full_state(state)
            return
        self.load_kv_state(state.llama_state, state.input_ids[: state.n_tokens])
        self.scores[: len(state.scores)] = state.scores
        self._seed = state.seed

    def _load_full_state(self, state: llama_cpp.LlamaState) -> None:
        """The parent takes over the record of the state, which may be shorter than this one."""
        record = self.input_ids
        try:
            super().load_state(state)
        except (RuntimeError, ValueError) as error:
            self.input_ids = record
            self.reset()
            raise StateError(STATE_MISFIT) from error
        self.input_ids = record
        self.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]


def _grown(array: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
    """A copy with more rows; the new ones are not set."""
    grown = np.empty((n_rows, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown


def _mib(n_bytes: int) -> int:
    """Rounded up, so that a limit of so many is enough."""
    return -(-n_bytes // 2**20)


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


def check_file(model_path: str) -> None:
    """Refuse what is no model file, before anything is loaded.

    Raises:
        ModelError: it is missing, or no GGUF file.
    """
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
