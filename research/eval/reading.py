"""Read a text and return the model's predictions after every token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llama_cpp
import numpy as np

from pyh2o.cache.scoring import take_error
from pyh2o.compat.llama import Llama
from pyh2o.core.failures import check_logits
from pyh2o.errors import ContextLimitError
from pyh2o.writing.sampling import Sampling

from .metrics import FloatArray, log_softmax, surprises

# Greedy sampling.
GREEDY = Sampling(temperature=0.0, repeat_penalty=1.0)

# Maximum chunk size, if no compaction is needed.
CHUNK = 128


def predictions(
    llm: Llama, tokens: Sequence[int], at_once: int = CHUNK
) -> Iterator[tuple[int, FloatArray]]:
    """Evaluate tokens after the text so far, and yield the predictions after each of them.

    Rows are evicted exactly as if the tokens came one at a time: no chunk exceeds the free space,
    and after a compaction none exceeds the slack. Only a re-base, which evicts nothing, comes up to
    a chunk earlier. The tokens of a chunk search together, as those of a prompt do, so a token can
    retrieve rows for a later one.

    Args:
        llm: the model.
        tokens: to evaluate.
        at_once: maximum chunk size; with 1 each token searches alone, as during generation.

    Yields:
        Index of the first token of a chunk and log-probabilities [n_chunk, n_vocab] of the token
        after each of its tokens.

    Raises:
        ContextLimitError: there are not enough positions or cells.
        DecodeError: predictions are nan.
    """
    if llm.n_tokens + len(tokens) > llm.text.position_limit:
        raise ContextLimitError(
            f"a text of {llm.n_tokens + len(tokens)} tokens needs more than the "
            f"{llm.text.position_limit} available positions: give fewer tokens"
        )
    llm.text._grow(llm.n_tokens + len(tokens))
    batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
    try:
        start = 0
        while start < len(tokens):
            room = llm.text.room_in_batch() or llm.kv.slack
            chunk = tokens[start : start + min(at_once, CHUNK, room)]
            logits = _decode(llm, batch, chunk)
            for row in logits:
                check_logits(row)  # a mean would be nan too
            yield start, log_softmax(logits)
            start += len(chunk)
    finally:
        llama_cpp.llama_batch_free(batch)


def answer_surprises(llm: Llama, last: int, answer: Sequence[int]) -> FloatArray:
    """Return each answer token's negative log-likelihood in nats, and restore the text.

    Each token retrieves the same rows as if the model generated the answer.

    Args:
        llm: the model, whose text ends before `last`.
        last: the token before the answer.
        answer: tokens, at least one.

    Returns:
        [len(answer)].
    """
    with taken_back(llm):
        feed = [last, *answer[:-1]]
        parts = [
            surprises(log_probs, answer[start : start + len(log_probs)])
            for start, log_probs in predictions(llm, feed, 1 if llm.text.model.recalls else CHUNK)
        ]
    return np.concatenate(parts)


def spans_recalled(llm: Llama) -> list[tuple[int, int]]:
    """Return the passages retrieved since the start of a prompt."""
    return [(span.start, span.end) for span in llm.recalled()] if llm.text.model.recalls else []


def found_share(llm: Llama) -> float | None:
    """Return retrieved rows' share of attention; None for a cache without recall."""
    return llm.kv.found_share if llm.text.model.recalls else None


@contextmanager
def taken_back(llm: Llama) -> Iterator[None]:
    """Restore the text and the cache with all scores at the end.

    At least one token must be evaluated before the next one can be sampled.
    """
    n_tokens = llm.n_tokens
    if not llm.evicting:
        try:
            yield
        finally:
            llm.text.remove_tail(n_tokens)
        return
    # Removing only the tail would leave its attention in the scores.
    state, tokens = llm.kv_state(), llm.input_ids[:n_tokens].tolist()
    try:
        yield
    finally:
        llm.load_kv_state(state, tokens)


def _decode(llm: Llama, batch: llama_cpp.llama_batch, tokens: Sequence[int]) -> FloatArray:
    """Evaluate a chunk. Return its logits [n_tokens, n_vocab], valid until the next call."""
    start = llm.n_tokens
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if llama_cpp.llama_decode(llm.ctx, batch) != 0:
        raise take_error() or ContextLimitError(
            f"llama.cpp cannot evaluate the token at position {start}: its cache is full, or "
            "memory is insufficient: give fewer tokens"
        )
    llm.input_ids[start : start + len(tokens)] = tokens
    llm.n_tokens += len(tokens)
    logits: FloatArray = np.ctypeslib.as_array(
        llama_cpp.llama_get_logits(llm.ctx), (len(tokens), llm.n_vocab())
    )
    return logits
