"""Continuous batching of the texts of a model.

A single text is decoded in its own thread. Several texts have a thread each and wait here while a
batch thread decodes. A batch has the next token of every text that generates, and chunks of texts
that read a prompt.

Our kernels for small and large batches round differently. Therefore a chunk is decoded separately
from generated tokens, and a prompt is not divided into small chunks. Tokens that search the archive
together are not divided either.
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
from .failures import LogitsArray, clear_errors, decode_error

# Time to wait for the texts of the last batch, as a share of the time it took, with limits in
# seconds. After that, the next batch starts without them.
PATIENCE = 0.25
MIN_PATIENCE = 0.002
MAX_PATIENCE = 1.0  # in case the machine was suspended during that batch
# Maximum slowdown of generation while another text reads a prompt.
LONGEST_PAUSE = 1.75
# Weight of a new timing in the moving average.
NEWEST = 0.3
# Initial prefill chunk, before timings exist.
FIRST_CHUNK = 16
# Status of llama_decode after an abort.
ABORTED = 2
# Smaller batches are decoded without abort checks, which would slow them down.
MIN_ABORTABLE = 8


@dataclass
class Job:
    """Tokens of one text to evaluate.

    Attributes:
        start: position of the first token.
        wants: for each token, whether to return its logits.
        embeddings, places: of a picture, instead of the tokens (see `Projector.embeddings`).
        looks_ahead: whether attention is non-causal, so that all tokens are one batch.
        priority: prompts of higher priority are read first.
        check: abort callback of long chunks, called in the decoding thread. If it raises, the job
            ends and the chunk is discarded. In the main thread, signal handlers run there too.
        logits: requested logits; [n_vocab] each.
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
        return len(self.tokens) - self.done

    @property
    def ended(self) -> bool:
        return self.n_left == 0 or self.error is not None


@dataclass(frozen=True)
class BatchCounts:
    """Totals over the batches of an engine; `texts` is the sum of the texts in each batch."""

    batches: int = 0
    tokens: int = 0
    texts: int = 0
    seconds: float = 0.0


class Batcher:
    """Decodes jobs of several texts in batches.

    Args:
        context: llama.cpp's context; call `close` before it is freed.
        in_thread: whether to decode in a separate thread instead of the caller's.
        reading: maximum prefill chunk while other texts generate; `Pace` may reduce it.
        min_chunk: smallest chunk that rounds like the whole text.
        search_chunk: number of tokens that search the archive together; chunk size is a multiple.
        lock: lock of the context, released while a text waits for its job.
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
        self._read_at: dict[int, int] = {}  # number of the last batch with a chunk of a sequence
        self._batch = llama_cpp.llama_batch_init(n_batch, 0, 1)
        self._closed = False
        self._thread: threading.Thread | None = None
        if in_thread:
            self._thread = threading.Thread(target=self._run, name="pyh2o batches", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the batch thread; waiting jobs end with a ClosedError."""
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
        """Wait until all tokens of a job are evaluated. The caller holds `lock`.

        Raises:
            DecodeError: llama.cpp failed; some tokens of the job may be in the cache.
            ClosedError: the batcher was closed.
            BaseException: the error of `check`; the first `done` tokens are in the cache.
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
        """Return the number of evaluated tokens of a text's job. The caller holds `lock`."""
        job = self._jobs.get(seq_id)
        return 0 if job is None else job.done

    def leave(self, seq_id: int) -> None:
        """Stop waiting for a text that has ended."""
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
        """Return whether every text of the last batch has a new job or has ended."""
        return self._closed or self._expected <= {job.seq_id for job in self._pending()}

    def _plan(self) -> list[tuple[Job, int]]:
        """Return the jobs of the next batch and their token counts, by sequence."""
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
        """Return a sort key: by priority, then least recently read first."""
        return -job.priority, self._read_at.get(job.seq_id, -1)

    def _decode_all(self, chunks: list[tuple[Job, int]]) -> None:
        """Decode single tokens in one batch, then each longer chunk or picture separately."""
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
        """Decode chunks together; if that fails, decode each separately to find the cause."""
        if not chunks:
            return
        clear_errors()
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
        clear_errors()
        # the failed batch may have written some of its rows
        if llama_cpp.llama_memory_seq_rm(memory, job.seq_id, start, -1):
            status = self._decode([(job, n)])
        if status != 0:
            job.error = decode_error(status)

    def _decode(self, chunks: list[tuple[Job, int]]) -> int:
        """Decode a batch, copy its logits, and return llama_decode's status."""
        batch, i = self._batch, 0
        for job, n in chunks:
            for k in range(job.done, job.done + n):
                batch.token[i], batch.pos[i] = job.tokens[k], job.start + k
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, job.seq_id
                batch.logits[i] = job.wants[k]
                i += 1
        batch.n_tokens = i
        job = chunks[0][0]
        if job.embeddings is not None and job.places is not None:  # the only chunk of the batch
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
    """Return whether a chunk is a single token, which shares a batch with other texts."""
    return n == 1 and job.embeddings is None


def next_chunk(n_left: int, room: int, least: int, group: int = 1) -> int:
    """Return the size of the next chunk, such that all chunks have about the same size.

    Args:
        n_left: tokens to read.
        room: preferred maximum size.
        least: minimum size, unless `n_left` is smaller.
        group: the size is a multiple of this, except for the last chunk.
    """
    n_chunks = max(1, min(-(-n_left // room), n_left // least))
    size = -(-n_left // n_chunks)
    size += -size % group
    return size if n_left - size >= least else n_left


class Pace:
    """Limits prefill chunks so that they do not noticeably delay texts that generate.

    The limit is computed from the timings of earlier batches, and is never above `most`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._step_seconds: dict[int, float] = {}  # of batches without prefill, by number of texts
        self._read_seconds = 0.0  # per prefill token in a batch

    def chunk(self, n_written: int) -> int:
        """Return the maximum prefill chunk while `n_written` texts generate."""
        step = self._step(n_written)
        if step is None or self._read_seconds == 0.0:
            return min(FIRST_CHUNK, self._most)
        room = (LONGEST_PAUSE - 1) * step / self._read_seconds
        return max(1, min(self._most, int(room)))

    def record(self, n_written: int, n_read: int, seconds: float) -> None:
        if n_written == 0:
            return  # prefill without generation is faster per token
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
        """Return the estimated seconds of a batch without prefill; None without timings."""
        if not self._step_seconds:
            return None
        nearest = min(self._step_seconds, key=lambda n: abs(n - n_written))
        seconds = self._step_seconds[nearest]
        # the time of fewer texts is a lower bound, so the limit of the chunk is safe
        return seconds if nearest <= n_written else seconds * n_written / nearest
