"""`Llama`: llama_cpp's class over a `Model` and a `Text`."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from mmap import mmap
from operator import attrgetter
from typing import Any, TypeVar

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama as StockLlama  # programs may replace this name by our class
from llama_cpp import _internals as internals
from llama_cpp.llama_tokenizer import BaseLlamaTokenizer, LlamaTokenizer

from ..cache.kv_cache import MISFIT, IntArray
from ..core.arguments import load_model
from ..core.sampled import TextTokens
from ..core.text import Text
from ..core.utf8 import text_errors
from ..errors import StateError
from ..system.integers import whole_number
from ..writing.sampler import SamplerSettings
from ..writing.sampling import new_if_random
from . import chat, completion, sampling
from .memory import TextMemory

Self = TypeVar("Self", bound="Llama")


class EvictingState(llama_cpp.LlamaState):  # type: ignore[misc]  # llama_cpp is not typed
    """A state in the format of `Text.kv_state`."""


def _kept_in(owner: str, name: str, doc: str) -> property:
    """Return a property that delegates to an attribute of `owner`, a dotted path."""
    of = attrgetter(owner)

    def value(self: Llama) -> Any:
        return getattr(of(self), name)

    value.__doc__ = doc
    return property(value, lambda self, value: setattr(of(self), name, value))


class Llama(TextMemory, StockLlama):  # type: ignore[misc]  # llama_cpp is not typed
    """`llama_cpp.Llama` with a KV cache of fixed size, for texts of any length.

    The parent class documents what is not described here. Prompts longer than `n_ctx` stream
    through the cache. With a `max_tokens` of None, 0 or less, the default of chats, generation
    continues until the model stops: unlike in the parent, it does not end at `n_ctx`, so set a
    limit if the model may never stop. When the trained positions are used up, the rows in the
    cache get lower ones. A few models do not allow that (`kv.position_limit` is then the trained
    context): their texts end there with the finish reason "length".

    Args:
        model_path: a GGUF file.
        evict: False for the parent's full cache.
        n_ctx: the window in tokens; 0 for the trained context. It selects the LongRoPE factors as
            for a full cache.
        recall_archive: a file for the archive; None for memory. `kv_state` only refers to the
            file.
        mmproj: the GGUF file of a projector, for pictures and sound in chats.
        rpc_servers: other machines that compute layers (`pyh2o rpc-server`): a list of host:port,
            or one string with commas. All layers go to them and to the GPUs in proportion to their
            memory, unless n_gpu_layers limits them.
        store_mib: maximum MiB of snapshots of the cache, with which conversations and stories go
            back without reading again; 0 for none. 1,024 by default.
        load_progress: called with 0 to 1 while the model loads.
        prompt_progress: called with (tokens read, total tokens) while a prompt is read; first with
            0 if the prompt has several chunks.
        verbose: show llama.cpp's log; False by default, unlike in the parent.
        **arguments: fields of `EvictionSettings` (`hh`, `recent`, `policy`, `recall` ...), where
            the policy may be a string, and the parent's other arguments.

    Raises:
        SettingsError: a setting is invalid, or an argument is unknown.
        ModelError: the file is missing, or llama.cpp cannot read it.
        LibraryError: the library computes wrong products of the model's weights on this processor.
        UnsupportedModelError: the model's rows cannot be evicted; the message has the reason.
        ServerError: an RPC server is not reachable, is busy, or has another version.

    Attributes:
        text: the text, with its cache and its model.
    """

    def __init__(
        self,
        model_path: str,
        *,
        evict: bool = True,
        n_ctx: int = 0,
        recall_archive: str | os.PathLike[str] | None = None,
        rpc_servers: str | Sequence[str] | None = None,
        load_progress: Callable[[float], None] | None = None,
        prompt_progress: Callable[[int, int], None] | None = None,
        verbose: bool = False,
        **arguments: Any,
    ) -> None:
        if evict and arguments.get("embedding"):
            warnings.warn(
                "embedding=True reads each text at once and evicts nothing: set evict=False too",
                RuntimeWarning,
                stacklevel=2,
            )
        model = load_model(
            model_path,
            evict=evict,
            n_ctx=n_ctx,
            rpc_servers=rpc_servers,
            load_progress=load_progress,
            verbose=verbose,
            **arguments,
        )
        try:
            keeps_logits = bool(arguments.get("logits_all") or arguments.get("draft_model"))
            text = Text(model, archive=recall_archive, keeps_logits=keeps_logits)
        except BaseException:
            model.close()  # the traceback keeps this object alive
            raise
        text.prompt_progress = prompt_progress
        self._arguments = {"evict": evict, "n_ctx": n_ctx, **arguments}
        self._adapt(text, owns_model=True)
        if verbose:
            print(f"pyh2o: {self.kv.summary()}\npyh2o: {self.kv.details()}", file=sys.stderr)

    @classmethod
    def of(cls: type[Self], text: Text, arguments: dict[str, Any] | None = None) -> Self:
        """Return a `Llama` over an existing text, whose model others may use too.

        Args:
            text: stays open after `close`.
            arguments: arguments that the model was loaded with.
        """
        self = cls.__new__(cls)
        self._arguments = dict(arguments or {})
        self._adapt(text, owns_model=False)
        return self

    def _adapt(self, text: Text, *, owns_model: bool) -> None:
        """Set the attributes that llama_cpp's methods and programs use."""
        model, given = text.model, self._arguments
        self.text = text
        self._owns_model = owns_model
        self.model_path, self.verbose = model.path, model.verbose
        self.metadata = model.metadata
        self.cache: Any = None  # llama_cpp's, of whole states
        self.draft_model = given.get("draft_model")  # guesses how the text continues
        last = given.get("last_n_tokens_size", SamplerSettings.repeat_last_n)
        self.last_n_tokens_size = whole_number("last_n_tokens_size", last)
        self._seed = llama_cpp.LLAMA_DEFAULT_SEED
        if given.get("seed"):  # 0 is the default, as in llama_cpp
            self.set_seed(given["seed"])
        self.n_batch = model.n_batch
        self.model_params = model.weights.params
        self.context_params = type(model.context_params).from_buffer_copy(model.context_params)
        self.context_params.n_ctx = self.n_ctx()
        self.n_threads, self.n_threads_batch = (
            self.context_params.n_threads,
            self.context_params.n_threads_batch,
        )
        # Programs read these to find out how long a text may be.
        self._n_vocab, self._n_ctx = model.n_vocab, text.position_limit
        self._logits_all = text.keeps_logits

    # ---------------------------------------------------------------------------------------------
    # Closing
    # ---------------------------------------------------------------------------------------------

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and the cache.

        Raises:
            BusyError: another thread uses them.
        """
        # The parent calls this again when the object is deleted, even if `__init__` failed.
        text: Text | None = self.__dict__.get("text")
        lock = None if text is None else text.model.lock
        if text is None or lock is None or not self._owns_model or lock.closed or lock.forked:
            return
        with text.lock:
            text.model.close()

    def __del__(self) -> None:
        pass  # unlike the parent, do not close: others may use the text

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self._arguments,
            "model_path": self.model_path,
            "n_ctx": self.n_ctx(),
            "rpc_servers": self.text.model.weights.rpc_servers,
            "seed": None if self._seed == llama_cpp.LLAMA_DEFAULT_SEED else self._seed,
            "draft_model": self.draft_model,
            "verbose": self.verbose,
        }

    # ---------------------------------------------------------------------------------------------
    # Attributes that llama_cpp's methods use
    # ---------------------------------------------------------------------------------------------

    @property
    def _model(self) -> Any:
        self.text.model.lock.check()
        return self.text.model.native

    @property
    def _ctx(self) -> Any:
        self.text.model.lock.check()
        return self.text.model.context

    @functools.cached_property
    def _batch(self) -> Any:
        """Return llama_cpp's batch for embeddings."""
        return internals.LlamaBatch(
            n_tokens=self.n_batch, embd=0, n_seq_max=self.n_ctx(), verbose=self.verbose
        )

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the text; a lower value truncates the text."""
        return self.text.n_tokens

    @n_tokens.setter
    def n_tokens(self, n_tokens: int) -> None:
        if n_tokens != self.text.n_tokens:
            self.text.n_tokens = n_tokens
            self.text.logits = self.text.logits[:0]

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """Token ids; the first `n_tokens` are the text. Shape [at least n_tokens]."""
        return self.text.record

    @property
    def scores(self) -> npt.NDArray[np.single]:
        """Logits of all tokens with logits_all=True. Shape [at least n_tokens, n_vocab]."""
        return self.text.all_logits

    def n_ctx(self) -> int:
        """Return the window in tokens."""
        return self.text.model.window

    chat_format = _kept_in(
        "text.model.chat", "name", "Name of the chat format: one of llama_cpp's, or in the file."
    )
    chat_handler = _kept_in(
        "text.model.chat", "handler", "llama_cpp's chat handler, used before the format; or None."
    )
    spm_infill = _kept_in(
        "text.model",
        "spm_infill",
        "Whether the suffix comes before the prefix when a gap is filled.",
    )

    @property
    def _chat_handlers(self) -> dict[str, Any]:
        return self.text.model.chat.handlers

    @property
    def tokenizer_(self) -> BaseLlamaTokenizer:
        """The tokenizer: llama.cpp's, or the one that was set."""
        return self.text.model.tokenizer or LlamaTokenizer(self)

    @tokenizer_.setter
    def tokenizer_(self, tokenizer: BaseLlamaTokenizer) -> None:
        self.text.model.tokenizer = tokenizer

    # ---------------------------------------------------------------------------------------------
    # Vocabulary
    # ---------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> TextTokens:
        """Tokenize as the parent does.

        The tokens remember that they stand for a text: as a prompt, they may be replaced by the
        tokens that the model sampled for the same text.

        Raises:
            ModelError: the model has no vocabulary, or lacks the token that starts texts.
        """
        return self.text.model.tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens, even of those with more than 32 bytes, unlike the parent."""
        return self.text.model.detokenize(tokens, prev_tokens, special)

    # ---------------------------------------------------------------------------------------------
    # The text
    # ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Clear the text and the cache."""
        self.text.reset()

    def eval(self, tokens: Sequence[int]) -> None:
        """Append tokens and evaluate them (see `Text.eval`)."""
        self.text.eval(tokens)

    def set_seed(self, seed: int) -> None:
        """Set the seed; -1 and 2**32 - 1 choose a random one.

        Raises:
            SettingsError: the seed is not an integer.
        """
        self._seed = new_if_random(whole_number("seed", seed))

    @sampling.like(StockLlama.sample)
    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Sample the token after index `idx`, as the parent does.

        Raises:
            StateError: no token was evaluated since the text was cleared, truncated or loaded, or
                since an evaluation failed: the logits belong to another text.
            SettingsError: the logits of token `idx` are not available.
            DecodeError: a logit is NaN or infinite.
        """
        given = sampling.bound(StockLlama.sample, self, *args, **kwargs)
        at = -1 if given["idx"] is None else given["idx"] - self.n_tokens
        return sampling.writer_of(self, given).sample(at)

    @sampling.like(StockLlama.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens as the parent does, until `position_limit`.

        A cached prefix of the prompt is not read again (see `keep_prefix`). Rejected drafts of a
        draft model slightly change the scores.

        Raises:
            BusyError: the text was changed between two tokens.
        """
        given = sampling.bound(StockLlama.generate, self, *args, **kwargs)
        yield from sampling.generated(self, given)

    @sampling.like(StockLlama.create_completion)
    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """Complete a prompt as the parent does, also with the DRY and XTC settings of `Sampling`.

        A `max_tokens` of None, 0 or less means no limit, except in the full cache.
        """
        given = sampling.bound(StockLlama.create_completion, self, *args, **kwargs)
        chunks = completion.completion(self, given)
        return chunks if given["stream"] else next(chunks)

    def create_chat_completion(
        self, messages: Any, *args: Any, continue_final_message: bool = False, **kwargs: Any
    ) -> Any:
        """Answer a chat; a chat template in the model's file adds reasoning and tools.

        Args:
            messages: the chat; with `mmproj` it may contain pictures, as data: URLs, and sound.
            continue_final_message: the last message is the start of the answer or of its
                reasoning (`reasoning_content`), and the result continues it.
            *args, **kwargs: the parent's; `response_format` may also have OpenAI's type
                "json_schema", and `tool_choice` may be "required". With a template in the file:
                enable_thinking: False to turn reasoning off, if the template supports that.
                reasoning_budget: maximum tokens of reasoning; 0 for none, -1 for no limit.
                chat_template_kwargs: more variables for the template.
                parallel_tool_calls: whether several calls at once are allowed; by default only if
                    no call is required.

        Raises:
            ChatError: the template refuses the messages.
            GrammarError: a grammar or schema is invalid or not supported.
            SettingsError: an option needs a template in the model's file.
            ValueError: the last message cannot be continued.
        """
        ours = {name: kwargs.pop(name) for name in chat.OURS if name in kwargs}
        given = sampling.bound(StockLlama.create_chat_completion, self, messages, *args, **kwargs)
        return chat.chat_completion(self, given, ours, continues=continue_final_message)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings as the parent does; an empty list for an empty list of texts."""
        given = sampling.bound(StockLlama.embed, self, *args, **kwargs)
        if self.context_params.embeddings and given["input"] != "" and len(given["input"]) == 0:
            return ([], 0) if given["return_count"] else []
        with self.text.lock, text_errors():
            return super().embed(*args, **kwargs)

    # ---------------------------------------------------------------------------------------------
    # States
    # ---------------------------------------------------------------------------------------------

    def save_state(self) -> llama_cpp.LlamaState:
        """Return the state of the text, including eviction."""
        with self.text.lock:
            data = bytes(self.text.kv_state())
            n_logits = self.n_tokens if self.text.keeps_logits else 0
            return EvictingState(
                input_ids=self.text.tokens.copy(),
                scores=self.text.all_logits[:n_logits].copy(),
                n_tokens=self.n_tokens,
                llama_state=data,
                llama_state_size=len(data),
                seed=self._seed,
            )

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Restore a state from `save_state`.

        Raises:
            StateError: the state has another model or other settings, or is damaged.
        """
        # llama.cpp must not read the parent's format: it would trust any bytes as sizes.
        if not isinstance(state, EvictingState):
            raise StateError(MISFIT)
        with self.text.lock:
            self.text.load_kv_state(state.llama_state, state.input_ids[: state.n_tokens])
            self.text.load_logits(state.scores)
            self._seed = state.seed

    def kv_state(self) -> bytes:
        """Return the state of the KV cache (see `Text.kv_state`)."""
        return bytes(self.text.kv_state())

    def load_kv_state(self, data: bytes | mmap, tokens: Sequence[int] | IntArray) -> None:
        """Restore a state from `kv_state` of these tokens (see `Text.load_kv_state`)."""
        self.text.load_kv_state(data, tokens)
