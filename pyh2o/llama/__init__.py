"""`Llama`: llama_cpp's class with a KV cache of fixed size."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from inspect import signature
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ..cache.kv_cache import IntArray
from ..cache.rows import HeavyHitter
from ..cache.settings import (
    DEFAULT_POLICY,
    ArchiveType,
    Attention,
    EvictionSettings,
    Positions,
    Prefill,
)
from ..errors import BusyError, EvictedError, SettingsError, StateError
from ..generation.drafts import FittingDrafts
from ..openai import completion
from ..policies import Policy, parse_policy
from . import recall as recalling
from . import states
from .arguments import KV_TYPES, check_arguments
from .drop_in import check_file
from .evicting import EvictingLlama
from .recall import RecalledSpan

__all__ = ["KV_TYPES", "HeavyHitter", "Llama", "RecalledSpan", "check_file"]

# Place of `reset` among the parent's positional arguments of `generate`, after the tokens.
RESET_ARGUMENT = 6
# Tokens of the text that are made room for at once.
FIRST_RECORD = 4096
# More tokens than any text has.
NEVER = 2**31


class Llama(EvictingLlama):
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
        recall: rows that a prompt gets back from the archive of all evicted ones, those that its
            end asks for: a fraction of `n_ctx` or a count; 0 for no archive.
        recall_type: "f32", "f16", "q8_0" or "q4_0", of the rows in the archive.
        recall_mib: most MiB that the archive may take; None for what it needs.
        recall_archive: a file for the archive, so that it takes no memory, and `kv_state` only
            refers to it; None for memory. Sessions have a file of their own beside them, as soon
            as they are saved.
        evict: False for the parent's full cache.
        n_ctx: the window, in tokens; 0 for the model's trained context.
        load_progress: called with 0 .. 1 while the model loads.
        prompt_progress: called with (tokens read, tokens in all) while a prompt is read.
        on_exact_prefill: called with (tokens to read, bytes) before an exact prefill takes so much
            memory; without it `verbose` prints that.
        verbose: show llama.cpp's log, which is long; False here, unlike in the parent.
        **kwargs: the parent's other arguments.

    Raises:
        SettingsError: settings that make no sense.
        ModelError: the file is missing or llama.cpp cannot read it.
        UnsupportedModelError: the model's rows cannot be evicted; the message has the reason.

    Attributes:
        evicting: whether rows are evicted.
        position_limit: most tokens of a text; 2**31 - 1 where positions are re-based.
        n_layer: layers of the model.
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
        recall: float | int = 0,
        recall_type: ArchiveType = "q8_0",
        recall_mib: int | None = None,
        recall_archive: str | os.PathLike[str] | None = None,
        evict: bool = True,
        n_ctx: int = 0,
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
        self.prompt_progress = prompt_progress
        self._holds_recalled = False
        self._n_alone = NEVER
        # Embedding contexts see each text once and in full: there is nothing to evict.
        evicting = evict and not kwargs.get("embedding") and not kwargs.get("vocab_only")
        check_arguments({"n_ctx": n_ctx, **kwargs}, own=signature(Llama.__init__).parameters)
        if settings.recall and not evicting and not kwargs.get("vocab_only"):
            raise SettingsError(
                f"recall is {recall}, but nothing is evicted that could be recalled: give recall=0 "
                "(--recall 0), or let rows be evicted (without --no-evict)"
            )
        if evict and kwargs.get("embedding"):
            warnings.warn(
                "embedding=True reads each text at once, and nothing is evicted: give evict=False "
                "with it",
                RuntimeWarning,
                stacklevel=2,
            )
        super().__init__(
            model_path,
            settings=settings,
            evict=evicting,
            n_ctx=n_ctx,
            load_progress=load_progress,
            on_exact_prefill=on_exact_prefill,
            recall_archive=recall_archive,
            verbose=verbose,
            **kwargs,
        )
        # Programs that read these want to know how much text they can give.
        if self.evicting:
            self.context_params.n_ctx = self.n_ctx()
            self._n_ctx = self.position_limit
            self._grow_record(0)
        if self.verbose:
            kv = self.kv
            print(f"pyh2o: {kv.summary()}\npyh2o: {kv.details()}", file=sys.stderr)

    # ---------------------------------------------------------------------------------------------
    # Set-up
    # ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.update(
            vars(self.settings),
            n_ctx=self.n_ctx(),
            evict=self.evicting,
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

    def reset(self) -> None:
        """Empty the text and the cache."""
        with self.guard:
            super().reset()
            self._holds_recalled = False
            self._n_alone = NEVER
            memory = llama_cpp.llama_get_memory(self.ctx)
            if memory is not None:
                llama_cpp.llama_memory_clear(memory, False)
            if self._archive is not None:
                self._archive.begin_text()

    def close(self) -> None:
        """Free the model; a file of an archive that no session was saved with goes."""
        archive, self._archive = getattr(self, "_archive", None), None
        super().close()
        if archive is not None:
            archive.remove_unsaved()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` there are.

        Raises:
            ContextLimitError: they need more positions than there are.
            EvictedError: `n_tokens` was set back to where rows have been evicted.
            SettingsError: an exact prefill needs more memory than `prefill_mib`, or than there is,
                or more positions than the model was trained on; nothing has been read.
        """
        self.eval_part(tokens, 0, len(tokens))

    def eval_part(self, tokens: Sequence[int], n_before: int, n_all: int) -> None:
        """`eval` of tokens that are a part of what is read (see `prompt_progress`).

        Args:
            tokens: to evaluate.
            n_before: tokens that have been read before them.
            n_all: tokens that are read in all; 0 for those that are taken back again.
        """
        with self.guard:
            self._cache.check_positions(self.n_tokens + len(tokens))
            if self.evicting:
                self._grow_record(self.n_tokens + len(tokens))
                self._drop_rows_behind()
            with self._cache.making_room(len(tokens)):
                n_read = 0
                while n_read < len(tokens):
                    n_left = len(tokens) - n_read
                    size = self._cache.chunk(self.n_tokens, n_left, self.n_batch)
                    super().eval(tokens[n_read : n_read + size])
                    n_read += size
                    self._refresh_recall(size)
                    if n_all > 1:
                        self._read(size, n_before + n_read, n_all)

    def _drop_rows_behind(self) -> None:
        """Drop the rows behind `n_tokens`, which programs may have set back."""
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            raise EvictedError(
                f"cannot go back to {self.n_tokens} tokens: rows before that were evicted; "
                "call reset() and evaluate the text again"
            )

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

    def _read(self, size: int, n_read: int, n_all: int) -> None:
        """After each piece of a text that is read."""
        if size > 1:
            self._cache.mark()
        if self.prompt_progress is not None:
            self.prompt_progress(n_read, n_all)

    def _refresh_recall(self, n_new: int) -> None:
        """Recall anew from time to time, unless what a question asked for has to stay."""
        if not self.recalls or self._holds_recalled:
            return
        every = self._cache.refresh_every()
        if self.n_tokens // every > (self.n_tokens - n_new) // every:
            self._recall_behind(self.n_tokens)

    def _recall_behind(self, n_tokens: int) -> bool:
        """Recall what the last queries ask for; whether the text behind so many tokens sees any."""
        sees_any = self._cache.recall()
        if sees_any:
            self._n_alone = min(self._n_alone, n_tokens)
        return sees_any

    def _drop_recalled(self) -> None:
        """Drop what is recalled."""
        self._cache.drop_recalled()
        if self.n_tokens <= self._n_alone:
            self._n_alone = NEVER

    def read(self, tokens: Sequence[int], *, hold: bool = True) -> None:
        """Evaluate a prompt or a turn, and recall what its end asks for.

        What was recalled before is dropped. Then all but the last 32 tokens are read, and these
        twice: once to ask, and once more with what they asked for. Without recall this is `eval`,
        and so it is for a single token, which only goes on.

        Args:
            tokens: to read.
            hold: nothing is recalled but for the end, and that stays until the next prompt is read,
                as an answer needs it; or else, for a text that goes on and on, the newest tokens
                ask anew from time to time, as with `eval`.

        Raises:
            PyH2OError: as `eval` does.
        """
        with self.guard:
            self._holds_recalled = hold
            if self.budget is None or not self.budget.recall or len(tokens) < 2:
                self.eval(tokens)
                return
            try:
                recalling.read(self, tokens, self.budget.recent)
            finally:
                self._holds_recalled = hold

    def recall(self, question: str | None = None) -> list[RecalledSpan]:
        """Recall the evicted rows that a question asks for, in place of those recalled before.

        They stay until a prompt is read, or others are recalled.

        Args:
            question: does not become a part of the text; at least one token has to be evaluated
                before the next one can be drawn. Where the slack has no room for it, rows are
                evicted for it. None: what the last tokens of the text ask for.

        Returns:
            what is recalled (see `recalled`).

        Raises:
            SettingsError: the question has too many tokens to be taken back, or there is no
                archive.
        """
        with self.guard:
            if self.budget is None or not self.budget.recall:
                raise SettingsError("there is nothing to recall from: give recall (--recall 0.05)")
            tokens: list[int] = []
            if question is not None:
                tokens = self.tokenize(question.encode(), add_bos=False, special=False)
            recalling.recall_for(self, tokens, self.budget.recent)
            return recalling.spans(self)

    def recalled(self) -> list[RecalledSpan]:
        """The passages that are recalled now, in the order of the text."""
        with self.guard:
            return recalling.spans(self)

    def can_remove_tail(self, n_tokens: int) -> bool:
        """Whether the text can be set back to its first `n_tokens` tokens exactly."""
        with self.guard:
            return n_tokens in (0, self.n_tokens) or self._cache.can_remove_tail(n_tokens)

    def remove_tail(self, n_tokens: int) -> bool:
        """Set the text back to its first `n_tokens` tokens, if all their rows are still there.

        At least one token has to be evaluated before the next one can be drawn.

        Returns:
            False if rows were evicted that the shorter text would still have; nothing is changed.

        Raises:
            ValueError: the text is shorter than that.
        """
        with self.guard:
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
        with self.guard:
            return self.n_tokens > 0 and bool(self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1))

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """The parent's generator of tokens; it ends at `position_limit`.

        Of what is in the cache and begins the prompt, so much is not read again as can be had as if
        nothing had ever come after it. So the tokens are those that the prompt alone would get,
        whatever the model was used for before. Two things may still round differently: text that
        the model has written itself, which it read one token at a time, and the place where an
        earlier prompt ended that this one goes on from. With `n_batch=1` and attention="ops" they
        do not. Rejected drafts of a draft model leave a trace in the scores.

        With `recall`, the end of an earlier prompt and what was written after it were computed from
        the rows that were recalled then. A prompt that goes on after all of that keeps them; any
        other is read again from before that end.

        Raises:
            BusyError: the text was changed between two tokens.
        """
        reset = args[RESET_ARGUMENT] if len(args) > RESET_ARGUMENT else kwargs.get("reset", True)
        if reset:
            with self.guard:
                self._go_back_for(tokens)
                self._read_for_recall(tokens)
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

    def _read_for_recall(self, prompt: Sequence[int]) -> None:
        """Read a prompt but for its last token, which gives the logits, where rows are recalled."""
        if self.recalls:
            self.read(prompt[self.n_tokens : -1])

    def _go_back_for(self, prompt: Sequence[int]) -> None:
        """Shorten a text that goes on otherwise than the prompt to where that leaves no trace."""
        n_both = min(self.n_tokens, len(prompt))
        differ = np.flatnonzero(self.input_ids[:n_both] != np.asarray(prompt[:n_both]))
        n_common = int(differ[0]) if differ.size else n_both
        if n_common == len(prompt) and (n_common < self.n_tokens or self._requires_eval):
            n_common -= 1  # the last one gives the logits
        if n_common < self.n_tokens and self.recalls:
            # its end asks anew, behind what was computed from the text alone
            n_common = max(0, min(n_common, len(prompt) - 1 - recalling.TAIL, self._n_alone))
        n_kept = self._cache.going_on(n_common, self.n_tokens)
        if n_kept < self.n_tokens and not (n_kept and self.remove_tail(n_kept)):
            self.reset()

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
        with self.guard:
            return states.kv_state(self)

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
        with self.guard:
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
            self._n_alone = 0  # nobody knows

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
            self.scores[: len(state.scores)] = state.scores
            self._seed = state.seed


def _grown(array: npt.NDArray[Any], n_rows: int) -> npt.NDArray[Any]:
    """A copy with more rows; the new ones are not set."""
    grown = np.empty((n_rows, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
