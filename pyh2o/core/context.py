"""Plan and create the context of a model, with the cells that its texts need."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from typing import Any

import llama_cpp
from llama_cpp import _internals as internals

from ..cache.native import check_model, learned_positions, least_cell_bytes, rotary_positions
from ..cache.settings import Budget, EvictionSettings, check_window
from ..errors import ModelError, SettingsError
from ..library.devices import has_own_kernels, why_no_gpu
from ..system.memory import available_bytes
from .parameters import Parameters
from .weights import Weights

# Window of a model without weights, as in llama_cpp.
VOCABULARY_CONTEXT = 512
# An invalid ggml type, whose rows take no memory.
_NO_ROWS = -1


@dataclass(frozen=True)
class ContextPlan:
    """Parameters of a context.

    Attributes:
        window: window of each text, in tokens.
        n_batch: maximum tokens of a text in a batch.
        budget: rows of each text; None for the full cache.
    """

    params: Any
    window: int
    n_batch: int
    budget: Budget | None = None


def plan_context(
    weights: Weights,
    parameters: Parameters,
    settings: EvictionSettings | None,
    n_ctx: int,
    n_texts: int = 1,
) -> ContextPlan:
    """Compute the parameters of a context.

    Args:
        settings: eviction settings of each text; None for the full cache.
        n_ctx: window of each text; 0 for the trained context.

    Raises:
        SettingsError: the model does not support such a context, or there is too little memory.
        UnsupportedModelError: its rows cannot be evicted.
    """
    trained = VOCABULARY_CONTEXT if parameters.vocab_only else int(weights.native.n_ctx_train())
    window, budget = n_ctx or trained, None
    if settings is not None:
        check_model(weights.address)
    elif not parameters.vocab_only:
        check_full_window(weights, window)
    params = _with_flash_attention(weights, parameters, settings).for_context(window)
    _check_flash_attention(weights, parameters, params)
    if settings is None:
        params.n_batch = min(params.n_batch, window)
        params.n_ubatch = min(params.n_batch, params.n_ubatch)
    else:
        n_pos = _n_positions(weights, parameters, window)
        # the devices of RPC servers are unknown
        on_gpu = bool(parameters.n_gpu_layers) and not weights.rpc_servers and why_no_gpu() is None
        budget = settings.resolve(window, n_pos, on_gpu=on_gpu)
        # A chunk is not larger than the slack, so larger buffers would be unused. With n_batch =
        # n_ubatch, llama.cpp divides no chunk into parts that it would round differently.
        params.n_batch = params.n_ubatch = min(params.n_batch, params.n_ubatch, budget.slack)
        params.n_ctx = budget.cells
        params.swa_full = False  # sliding windows get only the cells they need
    plan = ContextPlan(params, window, int(params.n_batch), budget)
    if parameters.embedding:
        most = int(llama_cpp.llama_max_parallel_sequences())
        params.n_seq_max, params.kv_unified = min(plan.n_batch, most), True
    if not parameters.vocab_only:
        check_memory(weights, plan, n_texts)
        params.n_ctx *= n_texts
    if n_texts > 1:
        params.n_seq_max, params.kv_unified = n_texts, False
        # the next token of every text, alongside a chunk
        params.n_batch += n_texts
        params.n_ubatch = max(params.n_ubatch, n_texts)
    return plan


def check_full_window(weights: Weights, window: int) -> None:
    """Raise a SettingsError if a full cache is too small, or exceeds the learned positions."""
    check_window(window)
    n_pos = learned_positions(weights.address)
    if n_pos is not None and window > n_pos:
        raise SettingsError(
            f"the window of {window} tokens exceeds the {n_pos} positions that this model has "
            "learned: lower n_ctx (--ctx) to that, or give 0"
        )


def _with_flash_attention(
    weights: Weights, parameters: Parameters, settings: EvictionSettings | None
) -> Parameters:
    """Enable flash attention for our own kernels, which use its layout of V."""
    if settings is None or settings.attention == "ops" or parameters.flash_attn is not None:
        return parameters
    has_device = bool(weights.rpc_servers) or why_no_gpu() is None
    on_cpu = not (parameters.n_gpu_layers and has_device)
    return replace(parameters, flash_attn=True) if on_cpu or has_own_kernels() else parameters


def _check_flash_attention(weights: Weights, parameters: Parameters, params: Any) -> None:
    """Disable flash attention for an architecture for which llama.cpp would crash."""
    enabled = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    if weights.architecture != "plm" or params.flash_attn_type != enabled:
        return
    if parameters.needs_flash_attention:
        raise SettingsError(
            "llama.cpp does not support flash attention or quantised V for "
            f"{weights.architecture} models: remove flash_attn and type_v (--kv-type)"
        )
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED


def _n_positions(weights: Weights, parameters: Parameters, window: int) -> int:
    trained = int(weights.native.n_ctx_train())
    if not parameters.stretches_positions or window <= trained:
        return rotary_positions(weights.address, window)
    model = weights.native.model
    if llama_cpp.llama_model_rope_type(model) == llama_cpp.LLAMA_ROPE_TYPE_NONE:
        raise SettingsError(
            "this model has no rotary positions to scale: remove the RoPE settings, or lower "
            f"n_ctx (--ctx) to the {trained} tokens it was trained on"
        )
    return window


def check_memory(weights: Weights, plan: ContextPlan, n_texts: int = 1) -> None:
    """Raise a SettingsError if the cells exceed the memory, which llama.cpp does not check."""
    params, n_cells = plan.params, int(plan.params.n_ctx)
    types, offload = (params.type_k, params.type_v), params.offload_kqv
    if not weights.loaded:  # only the metadata of cells is allocated
        types, offload = (_NO_ROWS, _NO_ROWS), False
    n_bytes = n_cells * n_texts * least_cell_bytes(weights.address, *types, offload=offload)
    available = available_bytes()
    if n_bytes <= available:
        return
    cure = "lower n_ctx (--ctx), or enable eviction (remove --no-evict)"
    if plan.budget is not None:
        cure = "lower n_ctx (--ctx), hh (--hh) or recent (--recent)"
    raise SettingsError(
        f"a cache of {n_cells} cells needs at least {n_bytes / 2**30:,.1f} GiB of memory, but only "
        f"{available / 2**30:,.1f} GiB are available: {cure}"
    )


def new_context(weights: Weights, params: Any) -> Any:
    """Return llama_cpp's internal context."""
    try:
        return internals.LlamaContext(model=weights.native, params=params, verbose=weights.verbose)
    except ValueError as error:
        raise ModelError(
            f"llama.cpp cannot create a context for {weights.path}: out of memory, or a cache type "
            "that does not fit the model's head size; see its log with verbose=True (--verbose)"
        ) from error


def add_adapter(weights: Weights, context: Any, path: str, scale: float) -> Any:
    """Load a LoRA adapter into a context, and return it for the caller to free."""
    adapter = llama_cpp.llama_adapter_lora_init(weights.native.model, os.fsencode(path))
    if not adapter:
        raise ModelError(
            f"llama.cpp cannot load the LoRA adapter {path}: the file is missing, damaged, not a "
            "GGUF adapter, or for another model; see its log with verbose=True"
        )
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    scales = (ctypes.c_float * 1)(scale)
    if llama_cpp.llama_set_adapters_lora(context.ctx, adapters, 1, scales):
        llama_cpp.llama_adapter_lora_free(adapter)
        raise ModelError(f"llama.cpp cannot use the LoRA adapter {path} with this model")
    return adapter
