"""Reading a text token by token, with the model's predictions behind every one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llama_cpp
import numpy as np

from ...errors import ContextLimitError
from ...generation.logits import check_logits
from ...generation.sampling import Sampling
from ...llama import Llama
from .metrics import FloatArray, log_softmax, share_within, surprises

# What a model says without any doubt: always the likeliest token.
GREEDY = Sampling(temperature=0.0, repeat_penalty=1.0)

# As many tokens are decoded at once, where no compaction comes between them.
CHUNK = 128


def predictions(llm: Llama, tokens: Sequence[int]) -> Iterator[tuple[int, FloatArray]]:
    """Evaluate tokens after the text so far, and say what the model expects behind each of them.

    Rows are evicted and recalled exactly when they would be if the tokens came one at a time: no
    chunk is larger than the room there is, and behind a compaction none is larger than the slack.
    Only a re-base, which evicts nothing, comes up to a chunk earlier.

    Args:
        llm: the model.
        tokens: to evaluate.

    Yields:
        Number of the first token of a chunk and log-probabilities [n_chunk, n_vocab] of what
        follows each of its tokens.

    Raises:
        ContextLimitError: there are no positions or no cells for so many tokens.
        DecodeError: what the model expects is no number.
    """
    if llm.n_tokens + len(tokens) > llm.position_limit:
        raise ContextLimitError(
            f"a text of {llm.n_tokens + len(tokens)} tokens needs more than the "
            f"{llm.position_limit} positions there are: give fewer tokens"
        )
    llm._grow_record(llm.n_tokens + len(tokens))
    batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
    try:
        start = 0
        while start < len(tokens):
            room = llm.room_in_batch() or llm.kv.slack
            chunk = tokens[start : start + min(CHUNK, room, llm.room_until_recall())]
            logits = _decode(llm, batch, chunk)
            for row in logits:
                check_logits(row)  # a mean would be none either
            log_probs = log_softmax(logits)
            llm._refresh_recall(len(chunk))
            yield start, log_probs
            start += len(chunk)
    finally:
        llama_cpp.llama_batch_free(batch)


def answer_surprises(llm: Llama, last: int, answer: Sequence[int]) -> FloatArray:
    """Negative log-likelihood of each token of an answer, in nats; the text stays as it is.

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
            for start, log_probs in predictions(llm, feed)
        ]
    return np.concatenate(parts)


def share_recalled(llm: Llama, places: Sequence[tuple[int, int]]) -> float | None:
    """Share of places in the text that are recalled as a whole, as far as they may be evicted.

    Args:
        llm: the model.
        places: first position and the one behind the last.

    Returns:
        None for a cache without recall, or if all rows of all places are still there.
    """
    if not llm.recalls:
        return None
    kv, spans = llm.kv, [(span.start, span.end) for span in llm.recalled()]
    return share_within(places, spans, before=kv.unarchived + kv.archived)


@contextmanager
def taken_back(llm: Llama) -> Iterator[None]:
    """At the end the text and the cache are what they were, with all scores.

    At least one token has to be evaluated before the next one can be drawn.
    """
    n_tokens = llm.n_tokens
    if not llm.evicting:
        try:
            yield
        finally:
            llm.remove_tail(n_tokens)
        return
    # To remove the tail alone would leave the attention that it paid in the scores.
    state, tokens = llm.kv_state(), llm.input_ids[:n_tokens].tolist()
    holds_recalled = llm._holds_recalled
    try:
        yield
    finally:
        llm.load_kv_state(state, tokens)
        llm._holds_recalled = holds_recalled


def _decode(llm: Llama, batch: llama_cpp.llama_batch, tokens: Sequence[int]) -> FloatArray:
    """Evaluate a chunk; logits [n_tokens, n_vocab] of all its tokens, valid until the next one."""
    start = llm.n_tokens
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if llama_cpp.llama_decode(llm.ctx, batch) != 0:
        raise ContextLimitError(
            f"llama.cpp cannot evaluate the token at position {start}: its cache is full, or there "
            "is too little memory; give fewer tokens"
        )
    llm.input_ids[start : start + len(tokens)] = tokens
    llm.n_tokens += len(tokens)
    logits: FloatArray = np.ctypeslib.as_array(
        llama_cpp.llama_get_logits(llm.ctx), (len(tokens), llm.n_vocab())
    )
    return logits
