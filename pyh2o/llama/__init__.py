"""`Llama`: llama_cpp's class with a KV cache of fixed size."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from inspect import signature
from mmap import mmap
from typing import Any

import llama_cpp
import numpy as np

from ..cache.kv_cache import IntArray
from ..cache.rows import HeavyHitter
from ..cache.settings import (
    ARCHIVE_MIB,
    DEFAULT_POLICY,
    ArchiveType,
    Attention,
    EvictionSettings,
    Positions,
    Prefill,
)
from ..errors import BusyError, StateError
from ..generation.drafts import FittingDrafts
from ..openai import completion
from ..policies import Policy, parse_policy
from ..system.rpc import ALL_LAYERS, layers_text, parse_servers
from ..text.drawn import DrawnTexts
from . import states
from .arguments import KV_TYPES, check_arguments
from .drop_in import check_file
from .reading import ReadingLlama
from .recalled import RecalledSpan

__all__ = ["KV_TYPES", "HeavyHitter", "Llama", "RecalledSpan", "check_file"]

# Place of `reset` among the parent's positional arguments of `generate`, after the tokens.
RESET_ARGUMENT = 6


class Llama(ReadingLlama):
    """`llama_cpp.Llama` that evicts: a text of any length in a KV cache of fixed size.

    Everything that is not named here is as in the parent class. Prompts longer than `n_ctx` stream
    through the cache, and `max_tokens=None` generates until the model stops. When the positions
    that the model was trained on are used up, the rows in the cache are given new ones. A few
    models do not allow that (`position_limit` is then the trained context): their texts end there,
    with the finish reason "trained_context".

    Args:
        model_path: a GGUF file.
        hh: heavy rows: a fraction of `n_ctx` (float) or a token count (int).
        recent: recent rows, likewise. A token attends to as many rows as both in all.
        pinned: first positions that are never evicted (a count).
        slack: cells beyond the budget; None is a twentieth of it (see EvictionSettings).
        policy: what makes a row worth keeping: a policy of `pyh2o.policies` or of your own, or its
            text, such as "snap:queries=32" or "my_file.py:MyPolicy".
        positions: "original" or "dense", for the rotary embeddings (see EvictionSettings).
        attention: what computes attention and scores (see EvictionSettings).
        prefill: "stream" or "exact", for a text that is longer than the cache (see
            EvictionSettings).
        prefill_mib: most MiB that an exact prefill may take; None for what it needs.
        recall: rows of these that each token finds among the evicted ones, in an archive: a
            fraction of `n_ctx` or a count; None is an eighth of them, 0 is for no archive.
        recall_type: "f32", "f16", "q8_0" or "q4_0", of the rows in the archive. Where a head's row
            is not whole blocks of q8_0, that is f16.
        recall_mib: most MiB that the archive may take, the oldest rows go; None for what it needs.
        recall_archive: a file for the archive, so that it takes no memory, and `kv_state` only
            refers to it; None for memory. Sessions have a file of their own beside them, as soon
            as they are saved.
        evict: False for the parent's full cache.
        n_ctx: the window, in tokens; 0 for the model's trained context. It chooses the factors of
            LongRoPE as it does for a full cache.
        rpc_servers: other machines that compute layers (`pyh2o rpc-server`): host:port of each, or
            all in one text with commas. All layers go to them and to the GPUs, by the memory that
            each has, unless n_gpu_layers says how many.
        load_progress: called with 0 .. 1 while the model loads.
        prompt_progress: called with (tokens read, tokens in all) while a prompt is read, first with
            0 where that takes several pieces.
        on_exact_prefill: called with (tokens to read, bytes) before an exact prefill takes so much
            memory; without it `verbose` prints that.
        verbose: show llama.cpp's log, which is long; False here, unlike in the parent.
        **kwargs: the parent's other arguments.

    Raises:
        SettingsError: settings that make no sense.
        ModelError: the file is missing or llama.cpp cannot read it.
        LibraryError: the library multiplies the model's weights wrongly on this processor.
        UnsupportedModelError: the model's rows cannot be evicted; the message has the reason.
        ServerError: a server cannot be used: nobody listens there, it is busy, of another version.

    Attributes:
        evicting: whether rows are evicted.
        position_limit: most tokens of a text; 2**31 - 2**20 where positions are re-based.
        n_layer: layers of the model.
        rpc_servers: host:port of each.
        drawn: texts that completions have written in, as the tokens that were drawn; a prompt that
            begins with such a text gets these.
    """

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
        recall: float | int | None = None,
        recall_type: ArchiveType = "q8_0",
        recall_mib: int | None = ARCHIVE_MIB,
        recall_archive: str | os.PathLike[str] | None = None,
        evict: bool = True,
        n_ctx: int = 0,
        rpc_servers: str | Sequence[str] | None = None,
        load_progress: Callable[[float], None] | None = None,
        prompt_progress: Callable[[int, int], None] | None = None,
        on_exact_prefill: Callable[[int, int], None] | None = None,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        settings = EvictionSettings(
            hh=hh,
            recent=recent,
            pinned=pinned,
            slack=slack,
            policy=parse_policy(policy),
            positions=positions,
            attention=attention,
            prefill=prefill,
            prefill_mib=prefill_mib,
            recall=recall,
            recall_type=recall_type,
            recall_mib=recall_mib,
        )
        # Embedding contexts see each text once and in full: there is nothing to evict.
        evicting = evict and not kwargs.get("embedding") and not kwargs.get("vocab_only")
        check_arguments({"n_ctx": n_ctx, **kwargs}, own=signature(Llama.__init__).parameters)
        if evict and kwargs.get("embedding"):
            warnings.warn(
                "embedding=True reads each text at once, and nothing is evicted: give evict=False "
                "with it",
                RuntimeWarning,
                stacklevel=2,
            )
        self.rpc_servers = parse_servers(rpc_servers)
        if self.rpc_servers and kwargs.get("n_gpu_layers") is None:
            kwargs["n_gpu_layers"] = ALL_LAYERS
        super().__init__(
            model_path,
            settings=settings,
            evict=evicting,
            n_ctx=n_ctx,
            load_progress=load_progress,
            on_exact_prefill=on_exact_prefill,
            prompt_progress=prompt_progress,
            recall_archive=recall_archive,
            rpc_servers=self.rpc_servers,
            verbose=verbose,
            **kwargs,
        )
        self.drawn = DrawnTexts()
        # Programs that read these want to know how much text they can give.
        if self.evicting:
            self.context_params.n_ctx = self.n_ctx()
            self._n_ctx = self.position_limit
            self._grow_record(0)
        if self.verbose:
            kv = self.kv
            print(f"pyh2o: {kv.summary()}\npyh2o: {kv.details()}", file=sys.stderr)
            if self.rpc_servers:
                print(f"pyh2o: {layers_text(self.layers_at())}", file=sys.stderr)

    # ---------------------------------------------------------------------------------------------
    # Set-up
    # ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.update(
            vars(self.settings),
            n_ctx=self.n_ctx(),
            evict=self.evicting,
            rpc_servers=self.rpc_servers,
            draft_model=self._draft_model and self._draft_model.model,
        )
        return state

    @property
    def draft_model(self) -> Any:
        """Guesses how the text goes on, for speculative decoding; None for none."""
        return self._draft_model

    @draft_model.setter
    def draft_model(self, model: Any) -> None:
        self._draft_model = None if model is None else FittingDrafts(model, self)

    # ---------------------------------------------------------------------------------------------
    # Text
    # ---------------------------------------------------------------------------------------------

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """The parent's generator of tokens; it ends at `position_limit`.

        Of what is in the cache and begins the prompt, so much is not read again as can be had as if
        nothing had ever come after it. So the tokens are those that the prompt alone would get,
        whatever the model was used for before. Two things may still round differently: text that
        the model has written itself, which it read one token at a time, and the place where an
        earlier prompt ended that this one goes on from. With `n_batch=1` and attention="ops" they
        do not. With `recall`, tokens that are read at once look for evicted rows together: there
        they may also find others. Rejected drafts of a draft model leave a trace in the scores.

        Raises:
            BusyError: the text was changed between two tokens.
        """
        tokens = list(tokens)
        reset = args[RESET_ARGUMENT] if len(args) > RESET_ARGUMENT else kwargs.get("reset", True)
        if reset:
            with self.guard:
                self._go_back_for(tokens)
                self._cache.forget_found()
        generator = super().generate(tokens, *args, **kwargs)
        sent: Sequence[int] | None = None
        while True:
            try:
                with self.guard:
                    token = generator.send(sent)
            except StopIteration:
                return
            n_tokens = self.n_tokens
            sent = yield token
            if self.n_tokens != n_tokens:
                raise BusyError(
                    "the text was changed while it was generated: let one generation end before "
                    "the model is used for anything else"
                )
            # the token itself is evaluated next, and what was sent after it
            if self.n_tokens + 1 + len(sent or ()) > self.position_limit:
                return

    def n_to_go_on(self, prompt: Sequence[int] | IntArray) -> int:
        """How many tokens of the text in the cache `generate` would go on from for this prompt.

        The others are read anew.
        """
        with self.guard:
            n_common, n_kept = self._n_kept_for(prompt)
            is_kept = n_kept == self.n_tokens or self.can_remove_tail(n_kept)
            return min(n_common, n_kept) if is_kept else 0

    def _go_back_for(self, prompt: Sequence[int]) -> None:
        """Shorten a text that goes on otherwise than the prompt to where that leaves no trace."""
        _, n_kept = self._n_kept_for(prompt)
        if n_kept < self.n_tokens and not (n_kept and self.remove_tail(n_kept)):
            self.reset()

    def _n_kept_for(self, prompt: Sequence[int] | IntArray) -> tuple[int, int]:
        """Tokens that the prompt has of the text, and how short that has to become first."""
        n_both = min(self.n_tokens, len(prompt))
        differ = np.flatnonzero(self.input_ids[:n_both] != np.asarray(prompt[:n_both]))
        n_common = int(differ[0]) if differ.size else n_both
        if n_common == len(prompt) and (n_common < self.n_tokens or self._requires_eval):
            n_common = max(0, n_common - 1)  # the last one gives the logits
        return n_common, self._cache.going_on(n_common, self.n_tokens)

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._complete(completion.CompletionRequest(*args, **kwargs))

    def _complete(
        self,
        request: completion.CompletionRequest,
        *,
        tokens: list[int] | None = None,
        usage_in_stream: bool = False,
    ) -> Iterator[Any]:
        return completion.complete(
            self,
            request,
            position_limit=self.position_limit,
            evicting=self.evicting,
            tokens=tokens,
            usage_in_stream=usage_in_stream,
        )

    # ---------------------------------------------------------------------------------------------
    # States
    # ---------------------------------------------------------------------------------------------

    def kv_state(self) -> bytes:
        """All that the KV cache holds: rows, scores, whose row lies where, counters.

        Raises:
            StateError: an evaluation was broken off, and rows were evicted for it.
        """
        return self.mapped_kv_state()[:]

    def mapped_kv_state(self) -> mmap:
        """What `kv_state` returns, in memory of its own that goes back to the system with it.

        For those who keep many: in malloc's memory each thread's part would grow to what it ever
        had.

        Raises:
            StateError: as for `kv_state`.
        """
        with self.guard:
            return states.mapped_kv_state(self)

    def load_kv_state(self, data: bytes | mmap, tokens: Sequence[int] | IntArray) -> None:
        """Put back what `kv_state` returned: the text goes on from there, bit for bit.

        With sliding windows that is to rounding: llama.cpp puts their rows into other cells.

        At least one token has to be evaluated before the next one can be drawn.

        Args:
            data: from `kv_state` or `mapped_kv_state` of a `Llama` of the same model and settings.
            tokens: the text; [n_tokens].

        Raises:
            StateError: another model, other settings, damaged data, or not the tokens' state. The
                text and the cache are then empty.
        """
        with self.guard:
            if self._archive is not None:
                self._archive.await_state()
            self.reset()
            try:
                states.read_kv_state(self, data, tokens)
            except StateError:
                self.reset()
                raise
            if self.evicting:
                self._grow_record(len(tokens))
            self.input_ids[: len(tokens)] = tokens
            self.n_tokens = len(tokens)
            self._requires_eval = True
            self._n_without_logits = len(tokens)

    def save_state(self) -> llama_cpp.LlamaState:
        """The parent's state, with all that eviction has to remember."""
        with self.guard:
            return states.evicting_state(self) if self.evicting else super().save_state()

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Load what `save_state` returned.

        Raises:
            StateError: another model, other settings, or damaged data.
        """
        # llama.cpp must not even try to read the other format: it takes any bytes for sizes.
        if isinstance(state, states.EvictingState) != self.evicting:
            raise StateError(states.MISFIT)
        with self.guard:
            if not self.evicting:
                states.load_full_state(self, state)
                return
            self.load_kv_state(state.llama_state, state.input_ids[: state.n_tokens])
            if self._logits_all and len(state.scores) == state.n_tokens:
                self.scores[: state.n_tokens] = state.scores
                self._n_without_logits = 0
            self._seed = state.seed
