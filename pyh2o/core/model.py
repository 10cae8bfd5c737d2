"""A model: its weights, its vocabulary and chat template, and a context with room for its texts."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import llama_cpp
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer

from ..cache.native import attach, few_tokens, keep_all, layer_of
from ..cache.settings import EvictionSettings, default_archive_mib, full_cache
from ..errors import SettingsError, StateError
from ..library.rpc import ALL_LAYERS
from ..models.file_identity import FileIdentity, identify
from ..system.integers import LARGEST_INT32, check_count, whole_number
from ..system.memory import spare_bytes
from .batcher import Batcher
from .chat_formats import ChatFormats
from .context import add_adapter, new_context, plan_context
from .detokenizer import PieceDetokenizer, detokenize
from .locks import ModelLock
from .parameters import Parameters
from .projector import Embeddings, Places, Projector
from .sampled import SampledTexts, TextTokens
from .states import rows_identity
from .vocabulary import inert_tokens, tokenize, tokens_after
from .weights import Weights, address

if TYPE_CHECKING:
    from .evaluated import EvaluatedText

# llama.cpp has no more sequences.
MAX_TEXTS = 256
# Tokens read at once while another text is written.
READING = 64
# Of a KV head: so many queries of a batch look for evicted rows together. Of more, those of whole
# tokens do, up to so many (native/src/kernels/h2o-kernel.h).
FEW_QUERIES = 16
QUERIES_TOGETHER = 64


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
        mmproj: the GGUF file of a projector, for pictures and sound.
        load_progress: called with 0 .. 1 while the weights load.
        rearranged: see `Weights`.
        verbose: show llama.cpp's log.

    Raises:
        PyH2OError: as `Llama` says.

    Attributes:
        lock: to hold while the context is used.
        weights: what was loaded; `native` and `context` are llama_cpp's internal objects.
        context_params: that the context was made with.
        file, lora_file: which files were loaded, whatever has their names by now.
        budget: the settings and what they come to for the window; None for the full cache.
        limits: the budget, or what stands for it in the full cache.
        window: tokens; fractions in the settings refer to it.
        n_batch: most tokens of a text that are computed at once.
        n_layer, n_vocab: of the model.
        min_chunk: as few tokens of what a text reads are rounded as if it were read as one.
        search_chunk: of so many tokens a piece is a multiple, unless it is the last.
        metadata: of the file.
        chat: its format.
        projector: of pictures and sound; None without one.
        tokenizer: in place of llama.cpp's own; None for that.
        spm_infill: whether a suffix comes before the prefix where a gap is filled.
        sampled_texts: generated texts with their sampled tokens, to match prompts against.
        batcher: decodes for all texts.
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
        verbose: bool = False,
    ) -> None:
        self.path = path
        self.verbose = verbose
        self.settings = settings or EvictionSettings()
        parameters = parameters or Parameters()
        if rpc_servers and parameters.n_gpu_layers is None:
            parameters = replace(parameters, n_gpu_layers=ALL_LAYERS)
        self.parameters = parameters
        # Embedding contexts see each text once and in full: there is nothing to evict.
        self.evicting = evict and not (parameters.embedding or parameters.vocab_only)
        cure = "give 0 for the model's own"
        n_ctx = check_count("n_ctx", n_ctx, least=0, most=LARGEST_INT32, cure=cure)
        self.n_texts = whole_number("texts", n_texts)
        if not 0 < self.n_texts <= MAX_TEXTS:
            raise SettingsError(f"{n_texts!r} texts at once: give a count from 1 to {MAX_TEXTS}")
        self.lock = ModelLock()
        self.tokenizer: BaseLlamaTokenizer | None = None
        self.spm_infill = False
        self.lora_file: FileIdentity | None = None
        self.sampled_texts = SampledTexts()
        self.projector: Projector | None = None
        self._texts: weakref.WeakSet[EvaluatedText] = weakref.WeakSet()
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
            self.close()  # whoever has the error keeps this object
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
            if self.settings.recall_mib is None:  # the weights and the cache have their memory now
                mib = default_archive_mib(spare_bytes(), self.n_texts)
                limited = replace(self.budget.settings, recall_mib=mib)
                self.budget = replace(self.budget, settings=limited)
            self.limits = self.budget = attach(self.address, self.budget)
            self.settings = self.budget.settings
        else:
            self.window = min(self.window, int(self.context.n_ctx()) // self.n_texts)
            self.limits = full_cache(self.settings, self.window)

    def _chunk_sizes(self) -> tuple[int, int]:
        """What a text that is read can be divided into, and comes to the same as undivided.

        Returns:
            the fewest tokens of a piece; and of how many it is a multiple, unless it is the last.
        """
        least, group = few_tokens(self.address) + 1, 1
        if self.recalls:
            n_head = int(llama_cpp.llama_model_n_head(self.native.model))
            layers = [layer_of(self.address, number) for number in range(self.n_layer)]
            growing = [layer for layer in layers if layer is not None and layer.grows]
            n_queries = {n_head // layer.kv_heads for layer in growing} or {n_head}
            least = max(least, FEW_QUERIES // min(n_queries) + 1) + 1  # the last one comes alone
            group = math.lcm(*(max(1, QUERIES_TOGETHER // n) for n in n_queries))
        return least, group

    def add(self, text: EvaluatedText) -> None:
        """Have a text: `close` waits until nobody uses it, and ends it, too."""
        self._texts.add(text)

    def close(self) -> None:
        """Free the model. Texts that are being read or written end with a `ClosedError`."""
        # A forked process leaves its copy to the system.
        if self.lock.closed or self.lock.forked:
            return
        self.lock.closed = True
        if hasattr(self, "batcher"):
            self.batcher.close()
        texts = list(self._texts)
        for text in texts:
            text.lock.wait()
        with self.lock.context_lock:  # nobody uses the context now
            self._stack.close()
        for text in texts:
            text.close()

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self.close()

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

    @cached_property
    def rows_identity(self) -> bytes:
        """A hash of what the rows of a text depend on besides its tokens and the cache."""
        return rows_identity(self)

    # ---------------------------------------------------------------------------------------------
    # Vocabulary
    # ---------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> TextTokens:
        """The tokens of a text in UTF-8; all of them, as a prompt, stand for the text.

        A mark of a picture (`Projector.mark`) becomes what stands for that, and the word for a
        special token's text (`InertTexts`) ordinary tokens of that text.

        Raises:
            ModelError: the model has no vocabulary, or no token that texts have to begin with.
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

    def embeddings(self, tokens: Sequence[int]) -> tuple[Embeddings, Places]:
        """What tokens of pictures stand for (see `Projector.embeddings`).

        Raises:
            StateError: it is not here.
        """
        if self.projector is None:
            raise StateError(
                "the text has a picture, and the model was loaded without a projector: give it one "
                "(mmproj, --mmproj FILE)"
            )
        return self.projector.embeddings(tokens)

    def detokenize(
        self,
        tokens: Iterable[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The text of tokens, in UTF-8."""
        self.lock.check()
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

    @cached_property
    def end_tokens(self) -> list[int]:
        """The tokens that mean so."""
        return [token for token in range(self.n_vocab) if self.is_end(token)]
