"""`llama_cpp.Llama` put right: hooks into its loading, checks before it, and what it gets wrong."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import llama_cpp
import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from llama_cpp.llama_tokenizer import LlamaTokenizer

from ..errors import ModelError, PyH2OError
from ..generation.grammar import GrammarGuard, GuardedSampler
from ..generation.logits import CheckedSampler
from ..openai.chat import OpenAIChat, as_json_object
from ..system.devices import why_no_gpu
from ..system.products import may_rearrange
from ..system.rpc import Offloading
from ..system.threads import physical_cores
from ..text.detokenizer import PieceDetokenizer, detokenize
from ..text.drawn import TextTokens
from ..text.vocabulary import tokenize
from .arguments import StockLlama
from .damage import LOGGER, check_header
from .file_identity import FileIdentity, identify
from .guard import Guard

Self = TypeVar("Self", bound="DropIn")


class DropIn(llama_cpp.Llama):  # type: ignore[misc]  # llama_cpp is not typed
    """The parent class with other defaults, errors that name the cure, and a hook into its set-up.

    Args:
        model_path: a GGUF file.
        load_progress: called with 0 .. 1 while the model loads.
        weights: False to load no weights and to take no memory for rows: the sizes of all are then
            known, and nothing can be computed.
        rpc_servers: host:port of other machines that compute layers.
        **kwargs: the parent's arguments.

    Raises:
        ModelError: the file is missing or llama.cpp cannot read it.
        LibraryError: the library multiplies the model's weights wrongly on this processor.
        ServerError: a server cannot be used.

    Attributes:
        guard: to enter before native memory is touched.
        model_file, lora_file: which files were loaded, whatever has their names by now.
    """

    lora_file: FileIdentity | None = None

    # The parent sets these.
    n_batch: int
    n_tokens: int
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]

    def __init__(
        self,
        model_path: str,
        *,
        load_progress: Callable[[float], None] | None,
        weights: bool = True,
        rpc_servers: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.guard = Guard()
        self._load_progress = load_progress
        self._weights = weights
        self._load_errors: list[BaseException] = []
        check_file(model_path)
        self.model_file = identify(model_path)
        wants_gpu = bool(kwargs.get("n_gpu_layers"))
        missing_gpu = why_no_gpu() if wants_gpu and not rpc_servers else None
        on_cpu = weights and (not wants_gpu or missing_gpu is not None)
        verbose = bool(kwargs.get("verbose"))
        can_be_mapped, types = check_header(model_path, on_cpu=on_cpu, verbose=verbose)
        if not weights or not can_be_mapped:
            kwargs["use_mmap"] = False  # llama.cpp aborts otherwise
        for name in ("n_threads", "n_threads_batch"):
            kwargs[name] = kwargs.get(name) or physical_cores()
        self._offloading = Offloading(rpc_servers) if rpc_servers else None
        if missing_gpu is not None:
            warnings.warn(missing_gpu, RuntimeWarning, stacklevel=3)
        computes = weights and not kwargs.get("vocab_only")
        has_gpu = wants_gpu and why_no_gpu() is None
        self._rearranged = not computes or self._may_rearrange(types, on_gpus=has_gpu)
        try:
            super().__init__(model_path, **kwargs)
        except PyH2OError:
            raise
        except ValueError as error:
            for load_error in self._load_errors:
                raise load_error from None
            raise ModelError(load_failure(model_path, error)) from error
        except TemplateError as error:
            raise ModelError(
                f"the chat template in {model_path} is no Jinja template "
                f"({' '.join(str(error).split())}): use another file of this model"
            ) from error
        if kwargs.get("lora_path"):
            self.lora_file = identify(kwargs["lora_path"])
        if self._offloading is not None:
            self._offloading.hold()

    def _may_rearrange(self, types: set[int], *, on_gpus: bool) -> bool:
        """Whether ggml may lay weights out as the processor likes them."""
        return may_rearrange(types, on_gpus=on_gpus)

    # ---------------------------------------------------------------------------------------------
    # Set-up. The parent loads the model and creates the context in one go, with no hook in between.
    # These attributes are what it sets at the right moments.
    # ---------------------------------------------------------------------------------------------

    @property
    def model_params(self) -> Any:
        """The parameters the model is loaded with."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._model_params = params
        params.no_alloc = not self._weights
        params.use_extra_bufts = self._rearranged
        if self._offloading is not None:
            self._offloading.hand_to(params)
        if self._load_progress is not None:
            report, errors = self._load_progress, self._load_errors

            def on_progress(fraction: float, _user_data: Any) -> bool:
                try:
                    report(fraction)
                except BaseException as error:
                    # No exception can pass through llama.cpp: stop the loading, and raise it after.
                    errors.append(error)
                return not errors

            # ctypes does not keep the callback alive by itself
            self._progress_callback = llama_cpp.llama_progress_callback(on_progress)
            params.progress_callback = self._progress_callback

    @property
    def _model(self) -> Any:
        self.guard.check()
        return self._loaded_model

    @_model.setter
    def _model(self, model: Any) -> None:
        self._loaded_model = model
        if not self.verbose:
            # llama_cpp takes warnings for errors, and there are some for many contexts
            LOGGER.setLevel(logging.CRITICAL)
        self._model_loaded()

    def _model_loaded(self) -> None:
        """Called between loading the model and creating the context."""

    @property
    def _ctx(self) -> Any:
        self.guard.check()
        return self._context

    @_ctx.setter
    def _ctx(self, context: Any) -> None:
        self._context = context

    @property
    def _lora_adapter(self) -> Any:
        return self._loaded_adapter

    @_lora_adapter.setter
    def _lora_adapter(self, adapter: Any) -> None:
        # The parent looks for None, and a null pointer is another object: the process would end.
        if adapter is not None and not adapter:
            raise ModelError(
                f"llama.cpp cannot load the LoRA adapter {self.lora_path}: the file is missing or "
                "damaged, no adapter in GGUF, or of another model; verbose=True shows its log"
            )
        self._loaded_adapter = adapter

    # ---------------------------------------------------------------------------------------------
    # The end
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
        # The parent closes again when the object goes, even if its set-up never began. A forked
        # process leaves its copy to the system.
        if hasattr(self, "_stack") and not self.guard.closed and not self.guard.forked:
            with self.guard:
                self.guard.close()
                super().close()
            if self._offloading is not None:
                self._offloading.release()

    # ---------------------------------------------------------------------------------------------
    # What the parent gets wrong
    # ---------------------------------------------------------------------------------------------

    def _init_sampler(
        self, *args: Any, grammar: Any = None, logits_processor: Any = None, **kwargs: Any
    ) -> Any:
        """The parent's; a grammar that cannot be read or followed is refused (`GrammarError`)."""
        if grammar is None:
            return self._checked_sampler(*args, logits_processor=logits_processor, **kwargs)
        guard = GrammarGuard(self, grammar)
        processors = [*(logits_processor or []), guard.mask]
        sampler = self._checked_sampler(*args, logits_processor=processors, **kwargs)
        return GuardedSampler(sampler, guard)

    def _checked_sampler(self, *args: Any, logits_processor: Any, **kwargs: Any) -> Any:
        chain = self._stock_sampler(*args, **kwargs)
        return CheckedSampler(chain, self, logits_processor or ())

    def _stock_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's chain of samplers, without a grammar and without logits processors."""
        return super()._init_sampler(*args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """The parent's.

        Raises:
            DecodeError: the logits are no numbers.
        """
        with self._guard_of_logits():
            return int(super().sample(*args, **kwargs))

    def _guard_of_logits(self) -> AbstractContextManager[None]:
        """What holds the logits of the last evaluation, and the model."""
        return self.guard

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's."""
        with self.guard:
            return super().embed(*args, **kwargs)

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's chat; `response_format` may also be of OpenAI's type "json_schema"."""
        if "response_format" in kwargs:
            kwargs["response_format"] = as_json_object(kwargs["response_format"])
        return StockLlama.create_chat_completion(self, *args, **kwargs)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """The parent's; the finish reason "trained_context", unknown to OpenAI, is "length"."""
        chat = OpenAIChat(self)
        return StockLlama.create_chat_completion_openai_v1(chat, *args, **kwargs)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> TextTokens:
        """The parent's; all of them, as a prompt, stand for the text (see `DrawnTexts`).

        It takes memory for this text, where the parent takes it for all of the trained context.

        Raises:
            ModelError: the model has no vocabulary, or no token that texts have to begin with.
        """
        self.guard.check()  # the tokenizer has kept the model's address
        if type(self.tokenizer_) is not LlamaTokenizer:
            return TextTokens(super().tokenize(text, add_bos, special))
        return TextTokens(tokenize(self._model.vocab, text, add_bos=add_bos, special=special))

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


def load_failure(model_path: str, error: ValueError) -> str:
    """Why llama_cpp could not load a model, in a line."""
    if "context" in str(error):
        return (
            f"llama.cpp cannot create a context for {model_path}: too little memory, or a cache "
            "type that does not fit the model's head size; verbose=True (--verbose) shows its log"
        )
    return (
        f"llama.cpp cannot load {model_path}: the file is damaged or of an unknown architecture; "
        "verbose=True (--verbose) shows its log"
    )
