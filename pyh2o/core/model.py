"""A model: its weights, its vocabulary and chat template, and a context with room for its texts."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp import _internals as internals
from llama_cpp._logger import set_verbose
from llama_cpp._utils import suppress_stdout_stderr
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer, LlamaTokenizer

from ..cache.eviction import attach
from ..cache.kv_cache import KVCache
from ..cache.loaded_model import check_model, learned_positions, least_cell_bytes, rotary_positions
from ..cache.settings import Budget, EvictionSettings, check_window
from ..errors import ModelError, SettingsError
from ..library.devices import has_own_kernels, why_no_gpu
from ..library.products import may_rearrange
from ..library.rpc import ALL_LAYERS, Offloading
from ..models.damage import LOGGER, check_file, check_header, load_failure
from ..models.file_identity import FileIdentity, identify
from ..system.memory import available_bytes
from .batcher import Batcher
from .chat_formats import ChatFormats
from .detokenizer import PieceDetokenizer, detokenize
from .drawn import DrawnTexts, TextTokens
from .guard import ModelGuard
from .parameters import Parameters, check_count
from .vocabulary import tokenize

if TYPE_CHECKING:
    from .text import Text

# llama.cpp has no more sequences.
MOST_TEXTS = 256
# Tokens read at once while another text is written.
READING = 64
# What a context without a model's weights has, as in llama_cpp.
VOCABULARY_CONTEXT = 512
# Of a KV head: so many queries of a batch look for evicted rows together. Of more, those of whole
# tokens do, up to so many (native/src/kernels/h2o-kernel.h).
FEW_QUERIES = 16
QUERIES_TOGETHER = 64

_backend_lock = threading.Lock()
_backend_is_ready = False


class Model:
    """Weights, vocabulary and chat template of a GGUF file, and a context that has room for texts.

    Args:
        path: a GGUF file.
        settings: what each text keeps.
        evict: False for llama.cpp's full cache.
        n_ctx: the window of each text, in tokens; 0 for the model's trained context.
        n_texts: texts at once.
        shared: whether threads look at a text while another one evaluates it: batches are then
            decoded in a thread of their own, as those of several texts always are.
        reading: most tokens that are read at once while another text is written.
        parameters: what llama.cpp gets.
        rpc_servers: host:port of other machines that compute layers.
        tokenizer: in place of llama.cpp's own; None for that.
        chat_format, chat_handler: in place of the file's template, as in llama_cpp.
        spm_infill: whether a suffix comes before the prefix where a gap is filled.
        load_progress: called with 0 .. 1 while the weights load.
        weights: False to load no weights and to take no memory for rows: the sizes of all are then
            known, and nothing can be computed.
        verbose: show llama.cpp's log.

    Raises:
        SettingsError: settings that make no sense.
        ModelError: the file is missing or llama.cpp cannot read it.
        LibraryError: the library multiplies the model's weights wrongly on this processor.
        UnsupportedModelError: the model's rows cannot be evicted; the message has the reason.
        ServerError: a server cannot be used.

    Attributes:
        guard: whether the model may be used, and whose turn it is.
        native, context: llama_cpp's internal objects.
        model_params, context_params: that they were made with.
        file, lora_file: which files were loaded, whatever has their names by now.
        budget: the settings and what they come to for the window; None for the full cache.
        window: tokens; fractions in the settings refer to it.
        n_batch: most tokens of a text that are computed at once.
        n_layer, n_vocab: of the model.
        least_piece: as few tokens of what a text reads are rounded as if it were read as one.
        search_group: of so many tokens a piece is a multiple, unless it is the last.
        metadata: of the file.
        chat: its format.
        drawn: texts that were written, as the tokens that were drawn; a prompt that begins with
            such a text gets these.
        batcher: decodes for all texts.
    """

    lora_file: FileIdentity | None = None

    def __init__(
        self,
        path: str,
        settings: EvictionSettings | None = None,
        *,
        evict: bool = True,
        n_ctx: int = 0,
        n_texts: int = 1,
        shared: bool = False,
        reading: int = READING,
        parameters: Parameters | None = None,
        rpc_servers: Sequence[str] = (),
        tokenizer: BaseLlamaTokenizer | None = None,
        chat_format: str | None = None,
        chat_handler: Any = None,
        spm_infill: bool = False,
        load_progress: Callable[[float], None] | None = None,
        weights: bool = True,
        verbose: bool = False,
    ) -> None:
        self.path = path
        self.verbose = verbose
        self.parameters = parameters or Parameters()
        self._wants_flash_attention = self.parameters.needs_flash_attention
        self.settings = settings or EvictionSettings()
        # Embedding contexts see each text once and in full: there is nothing to evict.
        self.evicting = evict and not (self.parameters.embedding or self.parameters.vocab_only)
        check_count("n_ctx", n_ctx, least=0, cure="give 0 for the model's own")
        if (
            isinstance(n_texts, bool)
            or not isinstance(n_texts, int)
            or not 0 < n_texts <= MOST_TEXTS
        ):
            raise SettingsError(f"{n_texts!r} texts at once: give a count from 1 to {MOST_TEXTS}")
        self.n_texts = n_texts
        self.guard = ModelGuard()
        self.window = n_ctx
        self.budget: Budget | None = None
        self.rpc_servers = tuple(rpc_servers)
        self.tokenizer = None if type(tokenizer) is LlamaTokenizer else tokenizer
        self.spm_infill = spm_infill
        self.drawn = DrawnTexts()
        self._texts: weakref.WeakSet[Text] = weakref.WeakSet()
        self._stack = contextlib.ExitStack()
        self._offloading: Offloading | None = None
        try:
            self._load(load_progress, weights=weights)
            self.metadata = self._read_metadata()
            self.chat = ChatFormats(
                self.native, self.metadata, name=chat_format, handler=chat_handler, verbose=verbose
            )
            self._open_context()
            self._evict()
            self.least_piece, self.search_group = self._pieces()
            self.batcher = Batcher(
                self.context.ctx,
                in_thread=shared or n_texts > 1,
                n_vocab=self.n_vocab,
                n_batch=int(self.context_params.n_batch),
                reading=reading,
                least_piece=self.least_piece,
                search_group=self.search_group,
                lock=self.guard.lock,
            )
        except BaseException:
            self.close()  # whoever has the error keeps this object
            raise

    # ---------------------------------------------------------------------------------------------
    # Weights
    # ---------------------------------------------------------------------------------------------

    def _load(self, progress: Callable[[float], None] | None, *, weights: bool) -> None:
        parameters = self.parameters
        check_file(self.path)
        self.file = identify(self.path)
        if self.rpc_servers and parameters.n_gpu_layers is None:
            parameters = self.parameters = replace(parameters, n_gpu_layers=ALL_LAYERS)
        wants_gpu = bool(parameters.n_gpu_layers)
        missing_gpu = why_no_gpu() if wants_gpu and not self.rpc_servers else None
        on_cpu = weights and (not wants_gpu or missing_gpu is not None)
        can_be_mapped, types = check_header(self.path, on_cpu=on_cpu, verbose=self.verbose)
        if self.rpc_servers:
            self._offloading = Offloading(self.rpc_servers)
        if missing_gpu is not None:
            warnings.warn(missing_gpu, RuntimeWarning, stacklevel=4)
        params = parameters.for_model(can_be_mapped=can_be_mapped and weights)
        params.no_alloc = not weights
        params.use_extra_bufts = True
        if weights and not parameters.vocab_only:
            has_gpu = wants_gpu and why_no_gpu() is None
            params.use_extra_bufts = self._may_rearrange(types, on_gpus=has_gpu)
        if self._offloading is not None:
            self._offloading.hand_to(params)
            if parameters.tensor_split is not None:  # goes before the memory that each has
                params.tensor_split = params.kept_shares
        self.model_params = params
        self.native = self._load_native(progress)
        self._stack.callback(self.native.close)
        self.n_layer = int(llama_cpp.llama_model_n_layer(self.native.model))
        self.n_vocab = int(self.native.n_vocab())
        if self._offloading is not None:
            self._offloading.hold()
            self._stack.callback(self._offloading.release)

    def _may_rearrange(self, types: set[int], *, on_gpus: bool) -> bool:
        """Whether ggml may lay weights out as the processor likes them."""
        return may_rearrange(types, on_gpus=on_gpus)

    def _load_native(self, progress: Callable[[float], None] | None) -> Any:
        errors: list[BaseException] = []

        def on_progress(fraction: float, _user_data: Any) -> bool:
            try:
                if progress is not None:
                    progress(fraction)
            except BaseException as error:
                # No exception can pass through llama.cpp: stop the loading, and raise it after.
                errors.append(error)
            return not errors

        _begin_backend(self.parameters.numa, verbose=self.verbose)
        # ctypes does not keep the callback alive by itself
        self._progress = llama_cpp.llama_progress_callback(on_progress)
        self.model_params.progress_callback = self._progress
        try:
            native = internals.LlamaModel(
                path_model=self.path, params=self.model_params, verbose=self.verbose
            )
        except ValueError as error:
            for raised in errors:
                raise raised from None
            raise ModelError(load_failure(self.path)) from error
        if not self.verbose:
            # llama_cpp takes warnings for errors, and there are some for many contexts
            LOGGER.setLevel(logging.CRITICAL)
        return native

    def _read_metadata(self) -> dict[str, str]:
        try:
            metadata: dict[str, str] = self.native.metadata()
        except UnicodeDecodeError as error:
            raise ModelError(load_failure(self.path)) from error
        return metadata

    # ---------------------------------------------------------------------------------------------
    # The context
    # ---------------------------------------------------------------------------------------------

    def _open_context(self) -> None:
        """Make a context with as many cells as the texts need, and no more."""
        vocab_only = self.parameters.vocab_only
        self.window = self.window or (
            VOCABULARY_CONTEXT if vocab_only else int(self.native.n_ctx_train())
        )
        params = self._context_params()
        if not vocab_only:
            self._check_memory(params)
            params.n_ctx *= self.n_texts
        if self.n_texts > 1:
            params.n_seq_max, params.kv_unified = self.n_texts, False
            # the next token of every text at once, beside a piece that one may read
            params.n_batch += self.n_texts
            params.n_ubatch = max(params.n_ubatch, self.n_texts)
        self.context_params = params
        self.context = self._new_context(params)
        self._stack.callback(self.context.close)
        self._adapt()

    def _new_context(self, params: Any) -> Any:
        try:
            return internals.LlamaContext(model=self.native, params=params, verbose=self.verbose)
        except ValueError as error:
            raise ModelError(
                f"llama.cpp cannot create a context for {self.path}: too little memory, or a cache "
                "type that does not fit the model's head size; verbose=True (--verbose) shows its "
                "log"
            ) from error

    def _context_params(self) -> Any:
        """`llama_context_params` for one text."""
        if self.evicting:
            check_model(address(self.native.model))
        elif not self.parameters.vocab_only:
            self._check_full_window()
        if self.evicting and self.settings.attention != "ops":
            self._prefer_flash_attention()
        params = self.parameters.for_context(self.window)
        self._check_flash_attention(params)
        if self.evicting:
            self._fit(params)
        else:
            params.n_batch = min(params.n_batch, self.window)
            params.n_ubatch = min(params.n_batch, params.n_ubatch)
        self.n_batch = int(params.n_batch)
        if self.parameters.embedding:
            most = int(llama_cpp.llama_max_parallel_sequences())
            params.n_seq_max, params.kv_unified = min(self.n_batch, most), True
        return params

    def _prefer_flash_attention(self) -> None:
        """Our own attention keeps V in the layout of ggml's flash attention."""
        if self.parameters.flash_attn is not None:
            return
        has_device = bool(self.rpc_servers) or why_no_gpu() is None
        on_cpu = not (self.parameters.n_gpu_layers and has_device)
        if on_cpu or has_own_kernels():
            self.parameters = replace(self.parameters, flash_attn=True)

    def _check_flash_attention(self, params: Any) -> None:
        """Without it where llama.cpp ends the process: it stores V of this architecture wrongly."""
        architecture = self.metadata.get("general.architecture")
        enabled = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if architecture != "plm" or params.flash_attn_type != enabled:
            return
        if self._wants_flash_attention:
            raise SettingsError(
                f"llama.cpp cannot run flash attention, nor store V quantised, for {architecture} "
                "models: leave flash_attn and type_v (--kv-type) out"
            )
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED

    def _check_full_window(self) -> None:
        check_window(self.window)
        n_pos = learned_positions(address(self.native.model))
        if n_pos is not None and self.window > n_pos:
            raise SettingsError(
                f"the window has {self.window} tokens, and this model has learned no more than "
                f"{n_pos} positions: lower n_ctx (--ctx) to that, or give 0"
            )

    def _fit(self, params: Any) -> None:
        """Let the context to be created have the cells of the budget."""
        native = self.native
        n_pos, trained = rotary_positions(address(native.model), self.window), native.n_ctx_train()
        if self.parameters.stretches_positions and self.window > trained:
            if llama_cpp.llama_model_rope_type(native.model) == llama_cpp.LLAMA_ROPE_TYPE_NONE:
                raise SettingsError(
                    f"this model has no rotary positions to scale: leave the rope settings out, or "
                    f"lower n_ctx (--ctx) to the {trained} tokens it was trained on"
                )
            n_pos = self.window
        budget = self.budget = self.settings.resolve(self.window, n_pos)
        # No more tokens than fit the slack are computed at once: reserve no memory for more. And
        # llama.cpp divides no batch further: a short rest would be rounded otherwise.
        params.n_batch = params.n_ubatch = min(params.n_batch, params.n_ubatch, budget.slack)
        params.n_ctx = budget.cells
        # a window gets the cells that it needs, not as many as the rest
        params.swa_full = False

    def _check_memory(self, params: Any) -> None:
        """Refuse more cells than there is memory for: llama.cpp would fill it until the end."""
        n_cells = self.window if self.budget is None else self.budget.cells
        n_bytes = n_cells * self.n_texts * self._least_cell_bytes(params)
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

    def _least_cell_bytes(self, params: Any) -> int:
        return least_cell_bytes(
            address(self.native.model), params.type_k, params.type_v, offload=params.offload_kqv
        )

    def _adapt(self) -> None:
        """Load the LoRA adapter, if there is one."""
        path = self.parameters.lora_path
        if not path:
            return
        adapter = llama_cpp.llama_adapter_lora_init(self.native.model, path.encode())
        if not adapter:
            raise ModelError(
                f"llama.cpp cannot load the LoRA adapter {path}: the file is missing or damaged, "
                "no adapter in GGUF, or of another model; verbose=True shows its log"
            )
        self._stack.callback(llama_cpp.llama_adapter_lora_free, adapter)
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
        scales = (ctypes.c_float * 1)(self.parameters.lora_scale)
        if llama_cpp.llama_set_adapters_lora(self.context.ctx, adapters, 1, scales):
            raise ModelError(f"llama.cpp cannot use the LoRA adapter {path} with this model")
        self.lora_file = identify(path)

    def _evict(self) -> None:
        if self.budget is None:
            self.window = min(self.window, int(self.context.n_ctx()) // self.n_texts)
            return
        self.budget = attach(KVCache(self.address), self.budget)
        self.settings = self.budget.settings

    def _pieces(self) -> tuple[int, int]:
        """What a text that is read can be divided into, and comes to the same as undivided.

        Returns:
            the fewest tokens of a piece; and of how many it is a multiple, unless it is the last.
        """
        kv = KVCache(self.address)
        least, group = kv.few_tokens() + 1, 1
        if self.recalls:
            n_head = int(llama_cpp.llama_model_n_head(self.native.model))
            layers = [layer for i in range(self.n_layer) if (layer := kv.layer(i)) is not None]
            n_queries = {n_head // layer.kv_heads for layer in layers if layer.grows} or {n_head}
            least = max(least, FEW_QUERIES // min(n_queries) + 1)
            group = math.lcm(*(max(1, QUERIES_TOGETHER // n) for n in n_queries))
        return least, group

    # ---------------------------------------------------------------------------------------------
    # The end
    # ---------------------------------------------------------------------------------------------

    def add(self, text: Text) -> None:
        """Have a text: `close` waits until nobody uses it, and ends it, too."""
        self._texts.add(text)

    def close(self) -> None:
        """Free the model. Texts that are being read or written end with a `ClosedError`."""
        # A forked process leaves its copy to the system.
        if self.guard.closed or self.guard.forked:
            return
        self.guard.closed = True
        if hasattr(self, "batcher"):
            self.batcher.close()
        texts = list(self._texts)
        for text in texts:
            text.guard.wait()
        with self.guard.lock:  # nobody uses the context now
            self._stack.close()
        for text in texts:
            text.close()

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self.close()

    # ---------------------------------------------------------------------------------------------
    # What it is
    # ---------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Of the context."""
        return address(self.context.ctx)

    @property
    def recalls(self) -> bool:
        """Whether tokens find evicted rows."""
        return self.budget is not None and self.budget.recall > 0

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether some layers keep a state that no text can be taken back from."""
        model = self.native.model
        return bool(
            llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        )

    def layers_at(self) -> dict[str, int]:
        """How many layers are computed where: by server and GPU, and "here" on the CPU.

        Without servers it is not known what llama.cpp has given to several GPUs: nothing is told.
        """
        if self._offloading is None:
            return {}
        # with the layers that predict further tokens, which llama.cpp spreads as well
        n_layer = int(self.metadata[f"{self.metadata['general.architecture']}.block_count"])
        return self._offloading.layers(n_layer, self.model_params)

    # ---------------------------------------------------------------------------------------------
    # Vocabulary
    # ---------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> TextTokens:
        """The tokens of a text in UTF-8; all of them, as a prompt, stand for the text.

        Raises:
            ModelError: the model has no vocabulary, or no token that texts have to begin with.
        """
        self.guard.check()
        if self.tokenizer is not None:
            return TextTokens(self.tokenizer.tokenize(text, add_bos, special))
        return TextTokens(tokenize(self.native.vocab, text, add_bos=add_bos, special=special))

    def detokenize(
        self,
        tokens: Iterable[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The text of tokens, in UTF-8."""
        self.guard.check()
        if self.tokenizer is not None:
            data: bytes = self.tokenizer.detokenize(list(tokens), prev_tokens, special)
            return data
        bos = self.token_bos()
        parts = PieceDetokenizer(self.native.vocab, bos, starts_text=False, special=special)
        return detokenize(parts, tokens)

    def token_bos(self) -> int:
        """The token that begins a text; -1 if there is none."""
        return int(self.native.token_bos())

    def is_end(self, token: int) -> bool:
        """Whether a token means "end of text", or the end of an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self.native.vocab, token))

    def end_tokens(self) -> list[int]:
        """The tokens that mean so."""
        return [token for token in range(self.n_vocab) if self.is_end(token)]


def address(pointer: Any) -> int:
    """The address in a ctypes pointer or integer."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


def _begin_backend(numa: bool | int, *, verbose: bool) -> None:
    """Let llama.cpp get ready, once in a process."""
    global _backend_is_ready
    set_verbose(verbose)
    with _backend_lock, suppress_stdout_stderr(disable=verbose):
        if not _backend_is_ready:
            llama_cpp.llama_backend_init()
            _backend_is_ready = True
        if numa:
            distribute = llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE
            llama_cpp.llama_numa_init(distribute if numa is True else numa)
    if verbose:
        print(llama_cpp.llama_print_system_info().decode(), file=sys.stderr)
