"""`llama_cpp.Llama` with a KV cache of fixed size: how large it is, what it holds, what stays."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp

from ..cache.eviction import Eviction, attach, mib
from ..cache.full_cache import FullCache
from ..cache.kv_cache import FloatArray, IntArray, KVCache
from ..cache.loaded_model import check_model, learned_positions, least_cell_bytes, rotary_positions
from ..cache.rows import HeavyHitter, heavy_hitters
from ..cache.settings import Budget, EvictionSettings, check_window
from ..cache.statistics import KVStatistics
from ..cache.text_cache import TextCache
from ..errors import SettingsError
from ..system.devices import has_own_kernels, why_no_gpu
from ..system.memory import available_bytes
from .archive_file import ArchiveFile
from .arguments import stretches_positions
from .drop_in import DropIn

QUANTIZED_KV_TYPES = (llama_cpp.GGML_TYPE_Q8_0, llama_cpp.GGML_TYPE_Q4_0)

# Of a KV head: so many queries of a batch look for evicted rows together. Of more, those of whole
# tokens do, up to so many (native/src/kernels/h2o-kernel.h).
FEW_QUERIES = 16
QUERIES_TOGETHER = 64

# What a context without a model's weights has, as in the parent.
VOCABULARY_CONTEXT = 512


class EvictingLlama(DropIn):
    """The parent class with a cache that evicts, or with its full cache in the place of that.

    What is not named here is as in `Llama`: arguments, attributes and errors.

    Args:
        settings: what to keep; `Llama` takes each of them as an argument.
        **kwargs: as for `DropIn`.
    """

    # Texts that the context has room for, and which of its sequences this one is.
    _n_texts = 1
    seq_id = 0

    def __init__(
        self,
        model_path: str,
        *,
        settings: EvictionSettings,
        evict: bool,
        n_ctx: int,
        on_exact_prefill: Callable[[int, int], None] | None,
        recall_archive: str | os.PathLike[str] | None,
        **kwargs: Any,
    ) -> None:
        self.evicting = evict
        self._settings = settings
        self._on_exact_prefill = on_exact_prefill
        self._window = n_ctx
        self._budget: Budget | None = None
        self._stretches_rope = stretches_positions(kwargs)
        self._needs_flash_attention = (
            bool(kwargs.get("flash_attn")) or kwargs.get("type_v") in QUANTIZED_KV_TYPES
        )
        if kwargs.get("type_v") in QUANTIZED_KV_TYPES:
            # llama.cpp keeps a quantised V only in the layout of flash attention.
            kwargs["flash_attn"] = True
        elif evict and settings.attention != "ops":
            # So does our own attention.
            has_device = bool(kwargs.get("rpc_servers")) or why_no_gpu() is None
            on_cpu = not (kwargs.get("n_gpu_layers") and has_device)
            if on_cpu or has_own_kernels():
                kwargs.setdefault("flash_attn", True)
        # The parent sizes its batches by n_ctx; the real size of the cache is set once the model
        # is known, in _model_loaded.
        n_ctx_parent = max(1, kwargs.get("n_batch", 512)) if evict else n_ctx
        if kwargs.get("vocab_only"):
            n_ctx_parent = n_ctx or VOCABULARY_CONTEXT
        super().__init__(model_path, n_ctx=n_ctx_parent, **kwargs)
        self.n_layer = int(llama_cpp.llama_model_n_layer(self.model))
        self._archive: ArchiveFile | None = None
        try:
            kv = KVCache(address(self.ctx))
            self._cache = self._open_cache(kv, recall_archive)
            self.least_piece, self.search_group = self._pieces(kv)
            self.position_limit = self._cache.position_limit
        except BaseException:
            self.close()  # whoever has the error keeps this object, and with it the archive's file
            raise

    def _model_loaded(self) -> None:
        """Between loading the model and creating the context: so many cells, and no more."""
        self._window = self._window or self._loaded_model.n_ctx_train()
        self._check_flash_attention()
        if self.evicting:
            self._fit_context()
        elif not self.model_params.vocab_only:
            self._check_full_window()
        if not self.model_params.vocab_only:
            self._check_memory()
            self.context_params.n_ctx *= self._n_texts

    def _check_flash_attention(self) -> None:
        """Without it where llama.cpp ends the process: it stores V of this architecture wrongly."""
        architecture = self._loaded_model.metadata().get("general.architecture")
        params = self.context_params
        if (
            architecture != "plm"
            or params.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        ):
            return
        if self._needs_flash_attention:
            raise SettingsError(
                f"llama.cpp cannot run flash attention, nor store V quantised, for {architecture} "
                "models: leave flash_attn and type_v (--kv-type) out"
            )
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED

    def _check_full_window(self) -> None:
        check_window(self._window)
        n_pos = learned_positions(address(self._loaded_model.model))
        if n_pos is not None and self._window > n_pos:
            raise SettingsError(
                f"the window has {self._window} tokens, and this model has learned no more than "
                f"{n_pos} positions: lower n_ctx (--ctx) to that, or give 0"
            )

    def _fit_context(self) -> None:
        """Let the context to be created have the cells of the budget."""
        model = self._loaded_model
        check_model(address(model.model))
        n_pos, trained = rotary_positions(address(model.model), self._window), model.n_ctx_train()
        if self._stretches_rope and self._window > trained:
            if llama_cpp.llama_model_rope_type(model.model) == llama_cpp.LLAMA_ROPE_TYPE_NONE:
                raise SettingsError(
                    f"this model has no rotary positions to scale: leave the rope settings out, or "
                    f"lower n_ctx (--ctx) to the {trained} tokens it was trained on"
                )
            n_pos = self._window
        budget = self._budget = self._settings.resolve(self._window, n_pos)
        # No more tokens than fit the slack are computed at once: reserve no memory for more. And
        # llama.cpp divides no batch further: a short rest would be rounded otherwise.
        n_batch = min(self.n_batch, self.context_params.n_ubatch, budget.slack)
        self.n_batch = self.context_params.n_batch = self.context_params.n_ubatch = n_batch
        self.context_params.n_ctx = budget.cells
        # a window gets the cells that it needs, not as many as the rest
        self.context_params.swa_full = False

    def _check_memory(self) -> None:
        """Refuse more cells than there is memory for: llama.cpp would fill it until the end."""
        n_cells = self._window if self._budget is None else self._budget.cells
        n_bytes = n_cells * self._n_texts * self._least_cell_bytes()
        available = available_bytes()
        if n_bytes <= available:
            return
        cure = "lower n_ctx (--ctx), or let rows be evicted (without --no-evict)"
        if self.evicting:
            cure = "lower n_ctx (--ctx), hh (--hh) or recent (--recent)"
        raise SettingsError(
            f"a cache of {n_cells} cells takes at least {n_bytes / 2**30:,.1f} GiB of memory, and "
            f"{available / 2**30:,.1f} GiB are available: {cure}"
        )

    def _least_cell_bytes(self) -> int:
        params = self.context_params
        return least_cell_bytes(
            address(self._loaded_model.model),
            params.type_k,
            params.type_v,
            offload=params.offload_kqv,
        )

    def _open_cache(self, kv: KVCache, recall_archive: str | os.PathLike[str] | None) -> TextCache:
        """Eviction, or the full cache in its place."""
        if self._budget is None:
            self._window = min(self._window, super().n_ctx())
            return FullCache(kv, self._settings, self._window)
        self._budget = attach(kv, self._budget)
        self._settings = self._budget.settings
        if self._budget.recall:
            self._archive = ArchiveFile(kv, recall_archive)
        # No cycle: a model's memory is freed with its last reference.
        this = weakref.proxy(self)
        return Eviction(kv, self._budget, lambda *sizes: this._say_exact_prefill(*sizes))

    def _pieces(self, kv: KVCache) -> tuple[int, int]:
        """What a text that is read can be divided into, and comes to the same as undivided.

        Returns:
            the fewest tokens of a piece; and of how many it is a multiple, unless it is the last.
        """
        least, group = kv.few_tokens() + 1, 1
        if self.recalls:
            n_head = int(llama_cpp.llama_model_n_head(self.model))
            layers = [layer for i in range(self.n_layer) if (layer := kv.layer(i)) is not None]
            n_queries = {n_head // layer.kv_heads for layer in layers if layer.grows} or {n_head}
            least = max(least, FEW_QUERIES // min(n_queries) + 1)
            group = math.lcm(*(max(1, QUERIES_TOGETHER // n) for n in n_queries))
        return least, group

    def _say_exact_prefill(self, n_tokens: int, n_bytes: int) -> None:
        if self._on_exact_prefill is not None:
            self._on_exact_prefill(n_tokens, n_bytes)
        elif self.verbose:
            print(
                f"pyh2o: an exact prefill of {n_tokens} tokens takes {mib(n_bytes)} MiB until then",
                file=sys.stderr,
            )

    @property
    def settings(self) -> EvictionSettings:
        """What was asked for."""
        return self._settings

    @property
    def budget(self) -> Budget | None:
        """The settings and what they come to for the window; None for the full cache."""
        return self._budget

    @property
    def recalls(self) -> bool:
        """Whether tokens find evicted rows."""
        return self._budget is not None and self._budget.recall > 0

    def n_ctx(self) -> int:
        """The window, in tokens: the context that was asked for."""
        return self._window

    # ---------------------------------------------------------------------------------------------
    # What the cache holds
    # ---------------------------------------------------------------------------------------------

    def layers_at(self) -> dict[str, int]:
        """How many layers are computed where: by server and GPU, and "here" on the CPU.

        Without servers it is not known what llama.cpp has given to several GPUs: nothing is told.
        """
        if self._offloading is None:
            return {}
        # with the layers that predict further tokens, which llama.cpp spreads as well
        metadata = self._model.metadata()
        n_layer = int(metadata[f"{metadata['general.architecture']}.block_count"])
        return self._offloading.layers(n_layer, self.model_params)

    @property
    def device_bytes(self) -> int:
        """Memory of servers and GPUs that weights, caches and work space take."""
        with self.guard:
            return self._cache.device_bytes()

    @property
    def kv(self) -> KVStatistics:
        """What the KV cache holds now and what it costs."""
        with self.guard:
            return self._cache.statistics(self.n_tokens)

    @property
    def archive(self) -> ArchiveFile | None:
        """Where the archive of recall lies; None if there is none."""
        return self._archive

    @property
    def archive_trouble(self) -> str:
        """What is wrong with the archive of recall, in one line; "" if nothing is."""
        with self.guard:
            return self._archive.trouble if self._archive is not None else ""

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
        with self.guard:
            return self._cache.rows(layer)

    def heavy_hitters(
        self, n: int = 20, *, layer: int | None = None, head: int | None = None
    ) -> list[HeavyHitter]:
        """The tokens in the cache with the highest scores (see `kv_rows`), highest first.

        A warning says why, where none has a score yet.

        Args:
            n: how many.
            layer: only this layer; None for all.
            head: only this KV head; None for all.

        Raises:
            NativeError: no such layer, or the cache does not evict and so keeps no scores.
            IndexError: no such KV head.
        """
        return heavy_hitters(self, n, layer=layer, head=head)

    def room_in_batch(self) -> int:
        """Tokens that the next evaluation takes at once; 0 if a compaction comes first."""
        with self.guard:
            return self._cache.room(self.n_tokens, self.n_batch)

    # ---------------------------------------------------------------------------------------------
    # What stays
    # ---------------------------------------------------------------------------------------------

    def pin(self, n_tokens: int) -> None:
        """Never evict the first tokens of this text, from now on until it is cleared.

        They take the places of heavy rows; the budget stays the same. Without eviction this does
        nothing.

        Raises:
            SettingsError: there are not so many pinned and heavy rows.
        """
        with self.guard:
            self._cache.pin(n_tokens)

    def pin_spans(self, spans: Sequence[tuple[int, int]]) -> None:
        """Never evict these tokens either, from now on until the text is cleared.

        They take the places of heavy rows. They may be tokens to come; rows that were evicted come
        back at once, from the archive if it has them. Without eviction this does nothing.

        Args:
            spans: (start, end) positions, end not included; ascending and apart. They take the
                place of spans given before.

        Raises:
            SettingsError: they are out of order, or more than the pinned and heavy rows.
        """
        with self.guard:
            self._cache.pin_spans(spans)

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
        with self.guard:
            self._cache.share_fairly(starts)


def address(pointer: Any) -> int:
    """The address in a ctypes pointer or integer."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
