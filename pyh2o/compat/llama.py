"""`Llama`: llama_cpp's class, its arguments, attributes and results, over a model and a text."""

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
from llama_cpp import Llama as StockLlama  # programs may put our class in the place of this one
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
    """A state of a text, in a format of its own."""


def _kept_in(owner: str, name: str, doc: str) -> property:
    """An attribute that the text or the model has; `owner` is the way to it."""
    of = attrgetter(owner)

    def value(self: Llama) -> Any:
        return getattr(of(self), name)

    value.__doc__ = doc
    return property(value, lambda self, value: setattr(of(self), name, value))


class Llama(TextMemory, StockLlama):  # type: ignore[misc]  # llama_cpp is not typed
    """`llama_cpp.Llama` that evicts: a text of any length in a KV cache of fixed size.

    Everything that is not named here is as in the parent class. Prompts longer than `n_ctx` stream
    through the cache. A `max_tokens` of None, 0 or less, the default of chats, generates until the
    model stops: the text does not end at `n_ctx`, as it does in the parent, so give a limit to a
    model that may never stop. When the positions
    that the model was trained on are used up, the rows in the cache are given new ones. A few
    models do not allow that (`kv.position_limit` is then the trained context): their texts end
    there, with the finish reason "length".

    Args:
        model_path: a GGUF file.
        evict: False for the parent's full cache.
        n_ctx: the window, in tokens; 0 for the model's trained context. It chooses the factors of
            LongRoPE as it does for a full cache.
        recall_archive: a file for the archive, so that it takes no memory, and `kv_state` only
            refers to it; None for memory. Sessions have a file of their own beside them, as soon
            as they are saved.
        mmproj: the GGUF file of a projector, for pictures and sound in chats.
        rpc_servers: other machines that compute layers (`pyh2o rpc-server`): host:port of each, or
            all in one text with commas. All layers go to them and to the GPUs, by the memory that
            each has, unless n_gpu_layers says how many.
        load_progress: called with 0 .. 1 while the model loads.
        prompt_progress: called with (tokens read, tokens in all) while a prompt is read, first with
            0 where that takes several pieces.
        verbose: show llama.cpp's log, which is long; False here, unlike in the parent.
        **arguments: what to keep, as in `EvictionSettings` (`hh`, `recent`, `policy`, `recall`
            ...), where a policy may be its text, and the parent's other arguments.

    Raises:
        SettingsError: settings that make no sense, or an argument that there is none of.
        ModelError: the file is missing or llama.cpp cannot read it.
        LibraryError: the library multiplies the model's weights wrongly on this processor.
        UnsupportedModelError: the model's rows cannot be evicted; the message has the reason.
        ServerError: a server cannot be used: nobody listens there, it is busy, of another version.

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
                "embedding=True reads each text at once, and nothing is evicted: give evict=False "
                "with it",
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
            model.close()  # whoever has the error keeps this object
            raise
        text.prompt_progress = prompt_progress
        self._arguments = {"evict": evict, "n_ctx": n_ctx, **arguments}
        self._adapt(text, owns_model=True)
        if verbose:
            print(f"pyh2o: {self.kv.summary()}\npyh2o: {self.kv.details()}", file=sys.stderr)

    @classmethod
    def of(cls: type[Self], text: Text, arguments: dict[str, Any] | None = None) -> Self:
        """The class over a text that there is, of a model that others use, too.

        Args:
            text: stays open when this is closed.
            arguments: that the model was loaded with.
        """
        self = cls.__new__(cls)
        self._arguments = dict(arguments or {})
        self._adapt(text, owns_model=False)
        return self

    def _adapt(self, text: Text, *, owns_model: bool) -> None:
        """Set what llama_cpp's methods and programs look for."""
        model, given = text.model, self._arguments
        self.text = text
        self._owns_model = owns_model
        self.model_path, self.verbose = model.path, model.verbose
        self.metadata = model.metadata
        self.cache: Any = None  # llama_cpp's, of whole states
        self.draft_model = given.get("draft_model")  # guesses how the text goes on
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
        # Programs that read these want to know how much text they can give.
        self._n_vocab, self._n_ctx = model.n_vocab, text.position_limit
        self._logits_all = text.keeps_logits

    # ---------------------------------------------------------------------------------------------
    # The end
    # ---------------------------------------------------------------------------------------------

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and the cache; a file of an archive that no session was saved with goes.

        Raises:
            BusyError: another thread uses them.
        """
        # The parent closes again when the object goes, even if its set-up never began.
        text: Text | None = self.__dict__.get("text")
        lock = None if text is None else text.model.lock
        if text is None or lock is None or not self._owns_model or lock.closed or lock.forked:
            return
        with text.lock:
            text.model.close()

    def __del__(self) -> None:
        pass  # the parent closes here; the text may be used by others, and goes with the last one

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
    # What llama_cpp's methods look for
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
        """Of texts whose embeddings are asked for."""
        return internals.LlamaBatch(
            n_tokens=self.n_batch, embd=0, n_seq_max=self.n_ctx(), verbose=self.verbose
        )

    @property
    def n_tokens(self) -> int:
        """Of the text; to set it back is to shorten the text."""
        return self.text.n_tokens

    @n_tokens.setter
    def n_tokens(self, n_tokens: int) -> None:
        if n_tokens != self.text.n_tokens:
            self.text.n_tokens = n_tokens
            self.text.logits = self.text.logits[:0]

    @property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """Tokens, of which the first `n_tokens` are the text; [at least n_tokens]."""
        return self.text.record

    @property
    def scores(self) -> npt.NDArray[np.single]:
        """The logits of all tokens, with logits_all; [at least n_tokens, n_vocab]."""
        return self.text.all_logits

    def n_ctx(self) -> int:
        """The window, in tokens: the context that was asked for."""
        return self.text.model.window

    chat_format = _kept_in(
        "text.model.chat", "name", "The name of the format of chats, in llama_cpp or in the file."
    )
    chat_handler = _kept_in(
        "text.model.chat", "handler", "llama_cpp's handler of chats, before the format; or None."
    )
    spm_infill = _kept_in(
        "text.model", "spm_infill", "Whether a suffix comes before the prefix of a gap to fill."
    )

    @property
    def _chat_handlers(self) -> dict[str, Any]:
        return self.text.model.chat.handlers

    @property
    def tokenizer_(self) -> BaseLlamaTokenizer:
        """llama.cpp's own, or another one that was given."""
        return self.text.model.tokenizer or LlamaTokenizer(self)

    @tokenizer_.setter
    def tokenizer_(self, tokenizer: BaseLlamaTokenizer) -> None:
        self.text.model.tokenizer = tokenizer

    # ---------------------------------------------------------------------------------------------
    # Vocabulary
    # ---------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> TextTokens:
        """The parent's; all of them, as a prompt, stand for the text (see `SampledTexts`).

        It takes memory for this text, where the parent takes it for all of the trained context.

        Raises:
            ModelError: the model has no vocabulary, or no token that texts have to begin with.
        """
        return self.text.model.tokenize(text, add_bos, special)

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The text of tokens; those of more than 32 bytes have one, too, unlike in the parent."""
        return self.text.model.detokenize(tokens, prev_tokens, special)

    # ---------------------------------------------------------------------------------------------
    # The text
    # ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the text and the cache."""
        self.text.reset()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` there are (see `Text.eval`)."""
        self.text.eval(tokens)

    def set_seed(self, seed: int) -> None:
        """The parent's; -1 and 2**32 - 1 choose a new seed.

        Raises:
            SettingsError: it is not a whole number.
        """
        self._seed = new_if_random(whole_number("seed", seed))

    @sampling.like(StockLlama.sample)
    def sample(self, *args: Any, **kwargs: Any) -> int:
        """The parent's; `idx` is the place of the token behind which one is drawn.

        Raises:
            StateError: no token was evaluated since the text was emptied, shortened or loaded, or
                since an evaluation failed: what logits there are belong to another text.
            SettingsError: the logits of token `idx` are not there.
            DecodeError: the logits are no numbers.
        """
        given = sampling.bound(StockLlama.sample, self, *args, **kwargs)
        at = -1 if given["idx"] is None else given["idx"] - self.n_tokens
        return sampling.writer_of(self, given).sample(at)

    @sampling.like(StockLlama.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """The parent's generator of tokens; it ends at `position_limit`.

        Of what is in the cache and begins the prompt, what can stay is not read again (see
        `keep_prefix`). Rejected drafts of a draft model leave a trace in the scores.

        Raises:
            BusyError: the text was changed between two tokens.
        """
        given = sampling.bound(StockLlama.generate, self, *args, **kwargs)
        yield from sampling.generated(self, given)

    @sampling.like(StockLlama.create_completion)
    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's; also with the settings of DRY and XTC in `Sampling`.

        A `max_tokens` of None, 0 or less is no limit (see above), except in the full cache.
        """
        given = sampling.bound(StockLlama.create_completion, self, *args, **kwargs)
        chunks = completion.completion(self, given)
        return chunks if given["stream"] else next(chunks)

    def create_chat_completion(
        self, messages: Any, *args: Any, continue_final_message: bool = False, **kwargs: Any
    ) -> Any:
        """The parent's chat; by a template of the model's file it knows thoughts and tools.

        Args:
            messages: the chat; with `mmproj` it may have pictures, as data: URLs, and sound.
            continue_final_message: the last message is the beginning of the answer, or of its
                thoughts (`reasoning_content`): what comes back goes on from there.
            *args, **kwargs: the parent's; `response_format` may also be of OpenAI's type
                "json_schema", and `tool_choice` "required". By a template of the file also:
                enable_thinking: False for a model that is not to think, if its template has that.
                reasoning_budget: most tokens of thoughts; 0 for none, -1 for any number.
                chat_template_kwargs: what the template is told besides.
                parallel_tool_calls: whether several tools may be called at once; where a call is
                    required only one is, unless this is True.

        Raises:
            ChatError: the template refuses the messages.
            GrammarError: the answer, or a call, cannot be held to what is asked for.
            SettingsError: what only templates of files have is asked for without one.
            ValueError: the last message cannot be continued.
        """
        ours = {name: kwargs.pop(name) for name in chat.OURS if name in kwargs}
        given = sampling.bound(StockLlama.create_chat_completion, self, messages, *args, **kwargs)
        return chat.chat_completion(self, given, ours, continues=continue_final_message)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's; of no texts, no vectors."""
        given = sampling.bound(StockLlama.embed, self, *args, **kwargs)
        if self.context_params.embeddings and given["input"] != "" and len(given["input"]) == 0:
            return ([], 0) if given["return_count"] else []
        with self.text.lock, text_errors():
            return super().embed(*args, **kwargs)

    # ---------------------------------------------------------------------------------------------
    # States
    # ---------------------------------------------------------------------------------------------

    def save_state(self) -> llama_cpp.LlamaState:
        """The parent's state, with all that eviction has to remember."""
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
        """Load what `save_state` returned.

        Raises:
            StateError: another model, other settings, or damaged data.
        """
        # llama.cpp must not even try to read the other format: it takes any bytes for sizes.
        if not isinstance(state, EvictingState):
            raise StateError(MISFIT)
        with self.text.lock:
            self.text.load_kv_state(state.llama_state, state.input_ids[: state.n_tokens])
            self.text.load_logits(state.scores)
            self._seed = state.seed

    def kv_state(self) -> bytes:
        """All that the KV cache holds (see `Text.kv_state`)."""
        return bytes(self.text.kv_state())

    def load_kv_state(self, data: bytes | mmap, tokens: Sequence[int] | IntArray) -> None:
        """Put back what `kv_state` returned, of this text (see `Text.load_kv_state`)."""
        self.text.load_kv_state(data, tokens)
