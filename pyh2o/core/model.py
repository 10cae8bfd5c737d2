"""A model: weights, vocabulary, chat template, and a context for its texts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import llama_cpp
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

from ..cache.native import attach, few_tokens, keep_all, layer_of
from ..cache.settings import EvictionSettings, default_archive_mib, full_cache
from ..errors import SettingsError, StateError
from ..library.rpc import ALL_LAYERS
from ..limits import DEFAULT_STORE_MIB
from ..models.file_identity import FileIdentity, identify
from ..system.integers import LARGEST_INT32, check_count, whole_number
from ..system.memory import spare_bytes
from .batcher import Batcher
from .chat_formats import ChatFormats
from .context import add_adapter, new_context, plan_context
from .detokenizer import PieceDetokenizer, detokenize
from .locks import ModelLock, TextLock
from .parameters import ROPE_NAMES, Parameters
from .prefix_cache import PrefixCache
from .projector import Embeddings, GridPositions, Projector
from .sampled import SampledTexts, TextTokens
from .vocabulary import inert_tokens, tokenize, tokens_after
from .weights import Weights, address

# llama.cpp's limit of sequences.
MAX_TEXTS = 256
# Maximum prefill chunk while other texts generate.
READING = 64
# Up to FEW_QUERIES queries of a KV head search the archive together. In larger batches, groups of
# up to QUERIES_TOGETHER queries of whole tokens do (native/src/kernels/h2o-kernel.h).
FEW_QUERIES = 16
QUERIES_TOGETHER = 64


class OpenText(Protocol):
    """A `Text`, as far as its model closes it."""

    lock: TextLock


class Model:
    """Weights, vocabulary and chat template of a GGUF file, and a context for several texts.

    Args:
        evict: False for llama.cpp's full cache.
        n_ctx: window of each text, in tokens; 0 for the trained context.
        shared: whether other threads read a text's cache during its evaluation. Batches are then
            decoded in a separate thread, as they always are for several texts.
        reading: maximum prefill chunk while other texts generate.
        rpc_servers: host:port of other machines that compute layers.
        store_mib: maximum size of all snapshots of texts, in MiB; 0 for none.

    Attributes:
        lock: to hold while the context is used.
        native, context: llama_cpp's internal objects.
        budget: the settings resolved for the window; None for the full cache.
        limits: the budget, or that of the full cache.
        window: tokens; fractions in the settings refer to it.
        n_batch: maximum tokens of a text in a batch.
        min_chunk: smallest chunk that rounds like the whole text.
        search_chunk: chunk size is a multiple of this, except for the last chunk.
        tokenizer: replacement of llama.cpp's tokenizer; None for llama.cpp's own.
        spm_infill: whether the suffix precedes the prefix when a gap is filled.
        sampled_texts: generated texts with their sampled tokens, to match prompts against.
        snapshots: prefixes of texts, to which they can return.
    """

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
        mmproj: str | None = None,
        load_progress: Callable[[float], None] | None = None,
        rearranged: bool | None = None,
        store_mib: int = DEFAULT_STORE_MIB,
        verbose: bool = False,
    ) -> None:
        self.path = path
        self.verbose = verbose
        self.settings = settings or EvictionSettings()
        parameters = parameters or Parameters()
        if rpc_servers and parameters.n_gpu_layers is None:
            parameters = replace(parameters, n_gpu_layers=ALL_LAYERS)
        self.parameters = parameters
        # an embedding context reads each text once and in full, so there is nothing to evict
        self.evicting = evict and not (parameters.embedding or parameters.vocab_only)
        cure = "give 0 for the model's own"
        n_ctx = check_count("n_ctx", n_ctx, least=0, most=LARGEST_INT32, cure=cure)
        self.n_texts = whole_number("texts", n_texts)
        if not 0 < self.n_texts <= MAX_TEXTS:
            raise SettingsError(f"texts is {n_texts!r}: give a count from 1 to {MAX_TEXTS}")
        self.lock = ModelLock()
        self.tokenizer: BaseLlamaTokenizer | None = None
        self.spm_infill = False
        self.lora_file: FileIdentity | None = None
        self.sampled_texts = SampledTexts()
        self.snapshots = PrefixCache(store_mib)
        self.projector: Projector | None = None
        self._texts: weakref.WeakSet[OpenText] = weakref.WeakSet()
        self._stack = contextlib.ExitStack()
        try:
            self.weights = Weights(
                path,
                parameters,
                rpc_servers=rpc_servers,
                rearranged=rearranged,
                progress=load_progress,
                verbose=verbose,
            )
            self._stack.callback(self.weights.close)
            self.native, self.metadata = self.weights.native, self.weights.metadata
            self.file = self.weights.file
            self.n_layer, self.n_vocab = self.weights.n_layer, self.weights.n_vocab
            self.chat = ChatFormats(self.native, self.metadata)
            self._open_context(n_ctx)
            if mmproj is not None:
                n_threads = int(self.context_params.n_threads_batch)
                self.projector = Projector(
                    mmproj,
                    self.weights,
                    most=min(self.n_batch, int(self.context_params.n_ubatch)),
                    n_threads=n_threads,
                    verbose=verbose,
                )
                self._stack.callback(self.projector.close)
                if self.projector.has_places and not self.evicting:
                    keep_all(self.address, self.window, self.n_batch)
            self.min_chunk, self.search_chunk = self._chunk_sizes()
            self.batcher = Batcher(
                self.context.ctx,
                in_thread=shared or n_texts > 1,
                n_vocab=self.n_vocab,
                n_batch=int(self.context_params.n_batch),
                reading=reading,
                min_chunk=self.min_chunk,
                search_chunk=self.search_chunk,
                lock=self.lock.context_lock,
            )
        except BaseException:
            self.close()  # the traceback keeps this object alive
            raise

    def _open_context(self, n_ctx: int) -> None:
        settings = self.settings if self.evicting else None
        plan = plan_context(self.weights, self.parameters, settings, n_ctx, self.n_texts)
        self.window, self.n_batch, self.budget = plan.window, plan.n_batch, plan.budget
        self.context_params = plan.params
        self.context = new_context(self.weights, plan.params)
        self._stack.callback(self.context.close)
        if self.parameters.lora_path:
            path = self.parameters.lora_path
            adapter = add_adapter(self.weights, self.context, path, self.parameters.lora_scale)
            self._stack.callback(llama_cpp.llama_adapter_lora_free, adapter)
            self.lora_file = identify(path)
        if self.budget is not None:
            if self.settings.recall_mib is None:  # after weights and cache were allocated
                mib = default_archive_mib(spare_bytes(), self.n_texts)
                limited = replace(self.budget.settings, recall_mib=mib)
                self.budget = replace(self.budget, settings=limited)
            self.limits = self.budget = attach(self.address, self.budget)
            self.settings = self.budget.settings
        else:
            self.window = min(self.window, int(self.context.n_ctx()) // self.n_texts)
            self.limits = full_cache(self.settings, self.window)

    def _chunk_sizes(self) -> tuple[int, int]:
        least, group = few_tokens(self.address) + 1, 1
        if self.recalls:
            n_head = int(llama_cpp.llama_model_n_head(self.native.model))
            layers = [layer_of(self.address, number) for number in range(self.n_layer)]
            growing = [layer for layer in layers if layer is not None and layer.grows]
            n_queries = {n_head // layer.kv_heads for layer in growing} or {n_head}
            # one more, as the last token of a prompt is evaluated separately
            least = max(least, FEW_QUERIES // min(n_queries) + 1) + 1
            group = math.lcm(*(max(1, QUERIES_TOGETHER // n) for n in n_queries))
        return least, group

    def add(self, text: OpenText) -> None:
        """Register a text, for `close` to wait for it."""
        self._texts.add(text)

    def close(self) -> None:
        """Free the model. Evaluations in progress end with a `ClosedError`."""
        # in a forked process, the operating system frees the copy
        if self.lock.closed or self.lock.forked:
            return
        self.lock.closed = True
        if hasattr(self, "batcher"):
            self.batcher.close()
        for text in list(self._texts):
            text.lock.wait()
        with self.lock.context_lock:
            self._stack.close()
        self.snapshots.clear()

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self.close()

    @property
    def address(self) -> int:
        return address(self.context.ctx)

    @property
    def recalls(self) -> bool:
        return self.budget is not None and self.budget.recall > 0

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether some layers have a recurrent state, which cannot be truncated."""
        model = self.native.model
        return bool(
            llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
        )

    @cached_property
    def rows_identity(self) -> bytes:
        """Return a hash of everything that rows depend on, except tokens and cache settings."""
        file, lora, params = self.file, self.lora_file, self.context_params
        adapter = lora and [lora.bytes, lora.sha256, self.parameters.lora_scale]
        rope = [getattr(params, name) for name in ROPE_NAMES]
        about = [file.bytes, file.sha256, adapter, rope, self.parameters.kv_overrides]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()

    # ---------------------------------------------------------------------------------------------
    # Vocabulary
    # ---------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> TextTokens:
        """Return the tokens of a UTF-8 text.

        Marks of pictures (`Projector.mark`) become tokens of the pictures. Placeholders of special
        tokens' texts (`InertTexts`) become ordinary tokens of these texts.
        """
        self.lock.check()
        if self.projector is None:
            return self._text_tokens(text, add_bos, special)
        tokens = TextTokens()
        for number, piece in enumerate(self.projector.pieces(text)):
            if isinstance(piece, tuple):
                tokens += piece
            elif piece or number == 0:
                tokens += self._text_tokens(piece, add_bos and number == 0, special)
        return tokens

    def _text_tokens(self, text: bytes, add_bos: bool, special: bool) -> TextTokens:
        first, *parts = self.chat.inert.split(text)
        if self.tokenizer is not None:
            tokens = TextTokens(self.tokenizer.tokenize(first, add_bos, special))
        else:
            vocab = self.native.vocab
            tokens = TextTokens(tokenize(vocab, first, add_bos=add_bos, special=special))
        for inert, text in zip(parts[::2], parts[1::2], strict=True):
            last = tokens[-1] if tokens else -1
            tokens += inert_tokens(self, last, inert.decode())
            tokens += tokens_after(self, tokens[-1], text.decode(), special=special)
        return tokens

    def embeddings(self, tokens: Sequence[int]) -> tuple[Embeddings, GridPositions]:
        """Return the embeddings of picture tokens (see `Projector.embeddings`)."""
        if self.projector is None:
            raise StateError(
                "the text has a picture, but the model was loaded without a projector: load it "
                "with one (mmproj, --mmproj FILE)"
            )
        return self.projector.embeddings(tokens)

    def detokenize(
        self, tokens: Iterable[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens, in UTF-8."""
        self.lock.check()
        if self.tokenizer is not None:
            data: bytes = self.tokenizer.detokenize(list(tokens), prev_tokens, special)
            return data
        bos = self.token_bos()
        parts = PieceDetokenizer(self.native.vocab, bos, starts_text=False, special=special)
        return detokenize(parts, tokens)

    def token_bos(self) -> int:
        """Return the BOS token; -1 if there is none."""
        return int(self.native.token_bos())

    def is_end(self, token: int) -> bool:
        """Return whether a token ends the text or the answer (EOS, EOT)."""
        return bool(llama_cpp.llama_vocab_is_eog(self.native.vocab, token))

    @cached_property
    def end_tokens(self) -> list[int]:
        return [token for token in range(self.n_vocab) if self.is_end(token)]
