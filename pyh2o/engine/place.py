"""A place for one text among others: a `Llama` that evaluates in batches with them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._internals import LlamaBatch

from ..cache.eviction import Eviction
from ..cache.full_cache import FullCache
from ..cache.kv_cache import KVCache
from ..cache.statistics import KVStatistics
from ..cache.watched import WatchedCache
from ..errors import PyH2OError, SettingsError
from ..generation.candidates import Candidates
from ..generation.logits import LogitsArray
from ..llama import Llama
from ..llama.archive_file import ArchiveFile
from ..llama.guard import Guard
from ..llama.reading import LEAST_BREAKABLE
from ..llama.recalled import passages
from ..openai import completion
from .batcher import Batcher, Job
from .shared_model import SharedModel


@dataclass(frozen=True)
class TextCounts:
    """What texts have taken so far.

    Attributes:
        prompt_tokens: of all prompts.
        cached_tokens: those of them that were in the cache, and were not read again.
        drawn_tokens: that were drawn, with those that ended a text.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    drawn_tokens: int = 0

    def __add__(self, other: TextCounts) -> TextCounts:
        return TextCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class PlaceReport:
    """What a place holds at one moment.

    Attributes:
        running: whether its text is being read or written; else it has ended.
        kv: its cache; `kv.position` is the length of the text in tokens.
        recalled: spans of evicted tokens that were looked at: (start, end), end not included.
    """

    running: bool
    kv: KVStatistics
    recalled: tuple[tuple[int, int], ...]


class Place(Llama):
    """`Llama` with the model and the context of others, and a text and a cache of its own.

    Whatever uses a `Llama` can use this one, in a thread of its own.

    Args:
        shared: the model; it stays open while this is used.
        seq_id: the sequence of its context that is this text.

    Attributes:
        priority: texts of a higher one are read first.
        shared_end: where a beginning ends that other texts have, too, and that is to be stored; 0
            for nowhere.
        owner: whose text this is, if nobody else may go on with it.
        keeps_text: whether the owner's text is here; the owner sets it once that is so.
        counts: of all texts that were here so far.
        begun: the tokens of the prompt that is completed next, if they are known.
    """

    _breakable = False  # here; the thread of the batches breaks them off

    def __init__(self, shared: SharedModel, seq_id: int) -> None:
        self.__dict__.update(vars(shared))
        self.seq_id = seq_id
        self.guard: PlaceGuard = PlaceGuard(shared.guard, shared.batcher)
        self.priority = 0
        self.shared_end = 0
        self.pauses = {}
        self.owner: object | None = None
        self.keeps_text = False
        self.counts = TextCounts()
        self.begun: list[int] | None = None
        self._batcher = shared.batcher
        self._context = PlaceContext(shared._context, self, shared.batcher)
        self._batch = LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=1, verbose=False)
        kv = KVCache(shared.address(), seq_id)
        if self._budget is None:
            self._cache = FullCache(kv, self._settings, self._window)
        else:
            self._cache = Eviction(kv, self._budget, self._say_exact_prefill)
        if self._budget is not None and self._budget.recall:
            self._archive = ArchiveFile(kv, None)
        # the parent would clear the states of all texts with one
        self._is_recurrent = self._is_hybrid = False
        self.input_ids = shared.input_ids.copy()
        self.scores = np.empty_like(shared.scores)  # a copy would take memory for each row of it
        self.n_tokens = 0

    def _stock_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return PlaceSampler(super()._stock_sampler(*args, **kwargs))

    def _guard_of_logits(self) -> AbstractContextManager[None]:
        return self.guard.without_context()  # they are a copy: other texts can be drawn meanwhile

    def _empty_cache(self, *, zero: bool) -> None:
        memory = llama_cpp.llama_get_memory(self.ctx)
        llama_cpp.llama_memory_seq_rm(memory, self.seq_id, -1, -1)
        if zero:
            self._cache.zero_rows()

    def begin_prompt(self, tokens: Sequence[int]) -> int:
        """Take the tokens of the prompt that is completed next, and count them.

        Returns:
            How many of them are in the cache, and are not read again.
        """
        self.begun = list(tokens)
        n_cached = max(0, min(self.n_to_go_on(tokens), len(tokens) - 1))
        self.counts += TextCounts(len(tokens), n_cached)
        return n_cached

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As `Llama.sample`; counts the token."""
        token = super().sample(*args, **kwargs)
        self.counts += TextCounts(drawn_tokens=1)
        return token

    def report(self, *, running: bool) -> PlaceReport:
        """What this place holds, from any thread; waits for the batch in the making.

        Its text goes on meanwhile: unlike `kv`, this does not take the text's own turn.
        """
        with self._batcher.lock:
            kv = self._cache.statistics(self._n_read)
            return PlaceReport(running, kv, self._spans_recalled())

    def watched(self) -> WatchedCache:
        """What the cache holds, from any thread, as for `report`; no batch is made meanwhile."""
        with self._batcher.lock:
            layers = range(self.n_layer) if self.evicting else ()
            return WatchedCache(
                evicting=self.evicting,
                n_layer=self.n_layer,
                n_tokens=self._n_read,
                kv=self._cache.statistics(self._n_read),
                rows=[self._cache.rows(layer) for layer in layers],
                recalled=self._spans_recalled(),
            )

    def _spans_recalled(self) -> tuple[tuple[int, int], ...]:
        return tuple((span.start, span.end) for span in passages(self))

    @property
    def _n_read(self) -> int:
        """Tokens in the cache: of a batch in the making, too."""
        return self.n_tokens + self._batcher.n_done(self.seq_id)

    def keep_part(self, tokens: Sequence[int], logits: Sequence[LogitsArray]) -> None:
        """Take tokens as read whose batch was given up behind them.

        Args:
            tokens: that are in the cache.
            logits: those that were wanted; [n_vocab] each.
        """
        start, end = self.n_tokens, self.n_tokens + len(tokens)
        self.input_ids[start:end] = tokens
        if self._logits_all and len(tokens):
            self.scores[start:end] = logits
        self.n_tokens = end
        self._requires_eval = True

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        request = completion.CompletionRequest(*args, **kwargs)
        tokens, self.begun = self.begun, None
        return self._complete(request, tokens=tokens, usage_in_stream=True)

    def leave_session(self) -> None:
        """Drop a text whose archive lies beside a session: its file is that session's alone."""
        if self._archive is not None and self._archive.is_of_session:
            with self.guard:
                self._archive.leave()
                self.reset()

    def close(self) -> None:
        """Nothing is this text's own but its place, which goes with the model."""

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the context is that of other texts, too.

        Raises:
            SettingsError: always.
        """
        raise SettingsError("embeddings come from a `Llama` of their own (embedding=True)")


class PlaceGuard(Guard):
    """One thread at a time for the text, and for the context of all texts likewise."""

    def __init__(self, shared: Guard, batcher: Batcher) -> None:
        super().__init__()
        self._shared = shared
        self._batcher = batcher
        self._depth = 0  # how often the text's thread has the context

    def check(self) -> None:
        """Refuse a use that is wrong for whichever thread (see `Guard.check`)."""
        self._shared.check()
        super().check()

    def __enter__(self) -> None:
        """Begin to use the text: waits for others who use the context."""
        super().__enter__()
        self._batcher.lock.acquire()
        self._depth += 1
        try:
            self.check()  # the engine may have been closed meanwhile
        except PyH2OError:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """End to use it."""
        self._depth -= 1
        self._batcher.lock.release()
        super().__exit__(*error)

    @contextmanager
    def without_context(self) -> Iterator[None]:
        """Use the text and the model, but not the context, which others may use meanwhile."""
        super().__enter__()
        depth, self._depth = self._depth, 0
        for _ in range(depth):  # `generate` has it around each token
            self._batcher.lock.release()
        try:
            self.check()
            yield
        finally:
            for _ in range(depth):
                self._batcher.lock.acquire()
            self._depth = depth
            super().__exit__()

    def wait_and_close(self) -> None:
        """Let nobody in any more, as soon as nobody uses the text."""
        with self._lock:
            self.close()


class PlaceContext:
    """The part of llama_cpp's context that is one text's; what is not here is that of all.

    Attributes:
        rows: logits of the last evaluation; [n_outputs, n_vocab].
    """

    def __init__(self, shared: Any, place: Place, batcher: Batcher) -> None:
        self._shared = shared
        self._place = place
        self._batcher = batcher
        self.rows: LogitsArray = np.empty((0, 0), np.single)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    def decode(self, batch: LlamaBatch) -> None:
        """Evaluate tokens of this text beside those of others.

        Raises:
            DecodeError: llama.cpp failed.
            BaseException: what `while_reading` raised.
        """
        native = batch.batch
        n = native.n_tokens
        job = Job(
            seq_id=self._place.seq_id,
            tokens=native.token[:n],
            start=native.pos[0],
            wants=[bool(flag) for flag in native.logits[:n]],
            priority=self._place.priority,
            check=self._place.while_reading if n >= LEAST_BREAKABLE else None,
        )
        try:
            self._batcher.evaluate(job)
        except BaseException:
            self._place.keep_part(job.tokens[: job.done], job.logits)
            raise
        self.rows = np.stack(job.logits)

    def get_logits(self) -> Any:
        """A pointer to the logits of the last evaluation."""
        return self.rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def get_logits_ith(self, i: int) -> Any:
        """A pointer to one row of them; negative counts from the last."""
        return self.rows[i].ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def kv_cache_seq_rm(self, _seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions of this text."""
        return bool(self._shared.kv_cache_seq_rm(self._place.seq_id, p0, p1))


class PlaceSampler:
    """llama_cpp's chain of samplers, for logits that lie outside of the context."""

    def __init__(self, chain: Any) -> None:
        self._chain = chain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    def sample(self, context: PlaceContext, idx: int = -1) -> int:
        """Draw a token.

        Args:
            context: of the text.
            idx: of its last evaluation's logits.
        """
        return Candidates(context.rows[idx]).draw(self._chain.sampler)
