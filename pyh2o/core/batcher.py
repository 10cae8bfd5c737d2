"""Decodes what the texts of a model have to evaluate, in one batch after the other.

One text alone is decoded where it is evaluated. Several run in a thread of their own each and wait
here while their tokens are evaluated, in another thread. A batch has the next token of every text
that is being written, and a chunk of one that is being read.

Our kernel for few tokens of a text rounds otherwise than that for many. So a chunk is decoded by
itself, where llama.cpp would decode its first token beside those that are written, and no chunk is
of few tokens unless all that its text reads is. Tokens that look for evicted rows together stay
together.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
import numpy.typing as npt

from ..cache.aborting import abortable
from ..errors import ClosedError
from .failures import LogitsArray, decode_error, forget_errors

# A text that was in the last batch is waited for so long: this share of the time that the batch
# took, and so many seconds at least and at most. Without it the others go on.
PATIENCE = 0.25
MIN_PATIENCE = 0.002
MAX_PATIENCE = 1.0  # also where the machine slept during that batch
# A batch in which a text reads takes at most so many times that of the others' tokens alone.
LONGEST_PAUSE = 1.75
# How much a new time counts against those before.
NEWEST = 0.3
# So many tokens are read beside texts that are written as long as no time is known.
FIRST_CHUNK = 16
# What llama_decode returns when it is broken off.
ABORTED = 2
# Fewer tokens are soon computed: Ctrl-C waits for them, and they take no longer for it.
MIN_ABORTABLE = 8


@dataclass
class Job:
    """Tokens of one text to evaluate.

    Attributes:
        seq_id: the sequence of the text.
        tokens: to evaluate.
        start: position of the first one.
        wants: for each token whether its logits are wanted.
        embeddings, places: in the place of the tokens, where these are of a picture (see
            `Projector.embeddings`).
        looks_ahead: whether all tokens see each other; they are computed at once then.
        priority: texts of a higher one are read first.
        check: called now and then while a longer chunk is decoded, in the thread that does it;
            what it raises ends the job, and the chunk leaves no trace. Handlers of signals run
            there, too, if that is the main thread. None asks nobody else.
        done: how many tokens have been evaluated.
        logits: those that were wanted; [n_vocab] each.
        error: why it ended early.
    """

    seq_id: int
    tokens: Sequence[int]
    start: int
    wants: Sequence[bool]
    embeddings: npt.NDArray[np.single] | None = None
    places: npt.NDArray[np.int32] | None = None
    looks_ahead: bool = False
    priority: int = 0
    check: Callable[[], None] | None = None
    done: int = 0
    logits: list[LogitsArray] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def n_left(self) -> int:
        """Tokens still to be evaluated."""
        return len(self.tokens) - self.done

    @property
    def ended(self) -> bool:
        """Whether its text can go on."""
        return self.n_left == 0 or self.error is not None


@dataclass(frozen=True)
class BatchCounts:
    """What the batches of an engine have held so far.

    Attributes:
        batches: how many there were.
        tokens: in all of them.
        texts: added up over the batches.
        seconds: that they took.
    """

    batches: int = 0
    tokens: int = 0
    texts: int = 0
    seconds: float = 0.0


class Batcher:
    """One batch after the other, as long as there are jobs.

    Args:
        context: llama.cpp's; `close` comes before it is freed.
        in_thread: whether batches are decoded in a thread of their own; else in that of the text.
        n_vocab: logits of a token.
        n_batch: most tokens of a batch.
        reading: most tokens of a batch that are read while another text is written; fewer, if that
            one would pause for too long (see `Pace`).
        min_chunk: as few tokens of what a text reads are rounded as if it were read as one.
        search_chunk: so many tokens of that look for evicted rows together.
        lock: whoever holds it may use the context. It is free while a text waits for its job.

    Attributes:
        counts: of the batches so far.
    """

    def __init__(
        self,
        context: llama_cpp.llama_context_p,
        *,
        in_thread: bool,
        n_vocab: int,
        n_batch: int,
        reading: int,
        min_chunk: int,
        search_chunk: int,
        lock: threading.RLock,
    ) -> None:
        self.counts = BatchCounts()
        self._context = context
        self._address = int(ctypes.cast(context, ctypes.c_void_p).value or 0)
        self._n_vocab = n_vocab
        self._n_batch = n_batch
        self._pace = Pace(reading)
        self._min_chunk = min_chunk
        self._search_chunk = search_chunk
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._jobs: dict[int, Job] = {}
        self._expected: set[int] = set()
        self._patience = MIN_PATIENCE
        self._read_at: dict[int, int] = {}  # the last batch in which a sequence read
        self._batch = llama_cpp.llama_batch_init(n_batch, 0, 1)
        self._closed = False
        self._thread: threading.Thread | None = None
        if in_thread:
            self._thread = threading.Thread(target=self._run, name="pyh2o batches", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End; those who wait are told so."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for job in self._jobs.values():
                job.error = ClosedError("the engine is closed: open it again")
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        llama_cpp.llama_batch_free(self._batch)

    # ---------------------------------------------------------------------------------------------
    # In the threads of the texts
    # ---------------------------------------------------------------------------------------------

    def evaluate(self, job: Job) -> None:
        """Wait until all tokens of a job have been evaluated; `lock` is held once, or more often.

        Raises:
            DecodeError: llama.cpp failed; what was evaluated of the job may be in the cache.
            ClosedError: the batcher was closed.
            BaseException: what `check` of the job raised; its first `done` tokens are in the cache.
        """
        if self._closed:
            raise ClosedError("the engine is closed: open it again")
        if self._thread is None:
            self._decode_all([(job, job.n_left)])
        else:
            self._await(job)
        if job.error is not None:
            raise job.error

    def _await(self, job: Job) -> None:
        self._jobs[job.seq_id] = job
        self._changed.notify_all()
        try:
            while not job.ended:
                self._changed.wait()
        finally:
            self._jobs.pop(job.seq_id, None)

    def n_done(self, seq_id: int) -> int:
        """Tokens of a text's job that have been evaluated already; `lock` is held."""
        job = self._jobs.get(seq_id)
        return 0 if job is None else job.done

    def leave(self, seq_id: int) -> None:
        """Do not wait for a text that has ended."""
        with self._lock:
            self._expected.discard(seq_id)
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------
    # In the thread of the batches
    # ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._lock:
            while True:
                self._changed.wait_for(lambda: self._closed or self._pending())
                if self._closed:
                    return
                self._changed.wait_for(self._is_complete, self._patience)
                chunks = self._plan()
                if chunks:
                    self._decode_all(chunks)
                    self._changed.notify_all()

    def _pending(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.ended]

    def _is_complete(self) -> bool:
        """Whether all texts of the last batch have something to evaluate again, or have ended."""
        return self._closed or self._expected <= {job.seq_id for job in self._pending()}

    def _plan(self) -> list[tuple[Job, int]]:
        """Jobs of the next batch and how many of their tokens, in the order of their sequences."""
        jobs = self._pending()
        plan = {job.seq_id: (job, 1) for job in jobs if job.n_left == 1}
        room = self._n_batch - len(plan)
        if plan:
            room = min(room, self._pace.chunk(len(plan)))
        longer = [job for job in jobs if job.n_left > 1]
        for job in sorted(longer, key=self._turn):
            if room > 0:
                n = next_chunk(job.n_left, room, self._min_chunk, self._search_chunk)
                n = job.n_left if job.looks_ahead else n
                plan[job.seq_id] = (job, n)
                room -= n
        return [plan[seq_id] for seq_id in sorted(plan)]

    def _turn(self, job: Job) -> tuple[int, int]:
        """Sorts who is read next: by priority, then who has not been read for longest."""
        return -job.priority, self._read_at.get(job.seq_id, -1)

    def _decode_all(self, chunks: list[tuple[Job, int]]) -> None:
        """Decode all single tokens in one batch, and each longer chunk, or one of a picture."""
        started = time.perf_counter()
        self._decode_or_each([chunk for chunk in chunks if _is_token(*chunk)])
        for chunk in chunks:
            if not _is_token(*chunk):
                self._decode_chunk(chunk)
        seconds = time.perf_counter() - started
        self._patience = min(max(MIN_PATIENCE, PATIENCE * seconds), MAX_PATIENCE)
        n_read = sum(n for _, n in chunks if n > 1)
        self._pace.record(sum(n == 1 for _, n in chunks), n_read, seconds)
        self._expected = {job.seq_id for job, _ in chunks if job.error is None}
        for job, n in chunks:
            if n > 1:
                self._read_at[job.seq_id] = self.counts.batches
        counts = self.counts
        self.counts = BatchCounts(
            batches=counts.batches + 1,
            tokens=counts.tokens + sum(n for _, n in chunks),
            texts=counts.texts + len(chunks),
            seconds=counts.seconds + seconds,
        )

    def _decode_chunk(self, chunk: tuple[Job, int]) -> None:
        """Decode tokens of one text, which it may break off."""
        job, n = chunk
        is_asked = self._thread is None or job.check is not None
        if n < MIN_ABORTABLE or not is_asked:
            self._decode_or_each([chunk])
            return
        try:
            with abortable(self._address, job.check):
                self._decode_or_each([chunk])
        except BaseException as error:
            job.error = error

    def _decode_or_each(self, chunks: list[tuple[Job, int]]) -> None:
        """Decode chunks together, or each by itself if that fails: one may be to blame."""
        if not chunks:
            return
        forget_errors()
        status = self._decode(chunks)
        if status in (0, ABORTED):
            return
        if len(chunks) == 1:
            chunks[0][0].error = decode_error(status)
            return
        for job, n in chunks:
            self._decode_alone(job, n)

    def _decode_alone(self, job: Job, n: int) -> None:
        memory = llama_cpp.llama_get_memory(self._context)
        start = job.start + job.done
        status = -1
        forget_errors()
        # a part of it may have been decoded
        if llama_cpp.llama_memory_seq_rm(memory, job.seq_id, start, -1):
            status = self._decode([(job, n)])
        if status != 0:
            job.error = decode_error(status)

    def _decode(self, chunks: list[tuple[Job, int]]) -> int:
        """llama_decode's status; logits are copied, since the next batch writes over them."""
        batch, i = self._batch, 0
        for job, n in chunks:
            for k in range(job.done, job.done + n):
                batch.token[i], batch.pos[i] = job.tokens[k], job.start + k
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, job.seq_id
                batch.logits[i] = job.wants[k]
                i += 1
        batch.n_tokens = i
        job = chunks[0][0]
        if job.embeddings is not None and job.places is not None:  # they come alone
            rows = np.ascontiguousarray(job.embeddings[job.done :])
            places = job.places[job.done : job.done + i]
            positions = np.array([batch.pos[:i], *places.T.tolist()], np.int32)
            batch = llama_cpp.llama_batch.from_buffer_copy(batch)
            batch.token, batch.embd = None, rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            batch.pos = positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        if job.looks_ahead:
            llama_cpp.llama_set_causal_attn(self._context, False)
        try:
            status = int(llama_cpp.llama_decode(self._context, batch))
        finally:
            if job.looks_ahead:
                llama_cpp.llama_set_causal_attn(self._context, True)
        if status != 0:
            return status
        i = 0
        for job, n in chunks:
            for k in range(job.done, job.done + n):
                if job.wants[k]:
                    job.logits.append(self._logits(i))
                i += 1
            job.done += n
        return 0

    def _logits(self, i: int) -> LogitsArray:
        pointer = llama_cpp.llama_get_logits_ith(self._context, i)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        logits: LogitsArray = np.ctypeslib.as_array(address, (self._n_vocab,)).copy()
        return logits


def _is_token(job: Job, n: int) -> bool:
    """Whether a chunk is a single token, which is decoded with those of other texts."""
    return n == 1 and job.embeddings is None


def next_chunk(n_left: int, room: int, least: int, group: int = 1) -> int:
    """How many of the tokens that a text reads are next, in chunks of about one size.

    Args:
        n_left: tokens to read.
        room: as many as there should be in a chunk,
        least: and as many as there have to be, unless all are fewer.
        group: of so many tokens there are whole groups in each chunk but the last.
    """
    n_chunks = max(1, min(-(-n_left // room), n_left // least))
    size = -(-n_left // n_chunks)
    size += -size % group
    return size if n_left - size >= least else n_left


class Pace:
    """How much may be read beside texts that are written, without a pause that one notices.

    It follows from the times of batches before.
    """

    def __init__(self, most: int) -> None:
        """`most` tokens are read at once beside others, however fast that is."""
        self._most = most
        self._step_seconds: dict[int, float] = {}  # by texts that are written, when none is read
        self._read_seconds = 0.0  # of one token more in a batch

    def chunk(self, n_written: int) -> int:
        """Most tokens to read in a batch beside so many texts that are written."""
        step = self._step(n_written)
        if step is None or self._read_seconds == 0.0:
            return min(FIRST_CHUNK, self._most)
        room = (LONGEST_PAUSE - 1) * step / self._read_seconds
        return max(1, min(self._most, int(room)))

    def record(self, n_written: int, n_read: int, seconds: float) -> None:
        """A batch took so long."""
        if n_written == 0:
            return  # nobody waited, and larger chunks are read faster
        if n_read == 0:
            before = self._step_seconds.get(n_written, seconds)
            self._step_seconds[n_written] = before + NEWEST * (seconds - before)
            return
        step = self._step(n_written)
        if step is not None:
            each = max(0.0, seconds - step) / n_read
            before = self._read_seconds or each
            self._read_seconds = before + NEWEST * (each - before)

    def _step(self, n_written: int) -> float | None:
        """Seconds of a batch of so many texts, as far as one like it is known."""
        if not self._step_seconds:
            return None
        nearest = min(self._step_seconds, key=lambda n: abs(n - n_written))
        seconds = self._step_seconds[nearest]
        # more texts take longer, but how much is not known: that of fewer is on the safe side
        return seconds if nearest <= n_written else seconds * n_written / nearest
