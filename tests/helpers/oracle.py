"""The NumPy reference as the oracle: run it on a text, and compare others with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import checkout  # noqa: F401
from pyh2o import Llama
from research.reference import ReferenceLlama, codes, search

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
# positions [n_rows] and scores [n_rows] of each KV head of a layer
LayerRows = tuple[Sequence[IntArray], Sequence[FloatArray]]

# Two correct implementations round differently. If a choice was closer than this, both are correct.
CLEAR_MARGIN = 1e-4

# The same for retrieval, in logits; and for the integers of estimates, one of which can be rounded
# differently if a query differs in its last bit.
CLEAR_SEARCH = 0.04
CLEAR_ROUNDING = 1e-4

MOST_ATTEMPTS = 2000
MOST_SEARCHES = 20_000


@dataclass(frozen=True)
class Step:
    """A step of the reference; of no tokens if a tail was removed or a span dropped.

    Attributes:
        logits: [len(tokens), n_vocab].
        found: [n_tokens] attention to evicted rows so far, by position.
        found_share: mean share of attention to retrieved rows, over all tokens.
    """

    tokens: list[int]
    n_tokens: int
    logits: FloatArray
    rows: list[LayerRows]
    found: FloatArray
    found_share: float
    dropped: tuple[int, int] | tuple[()] = ()


def chose_clearly(reference: ReferenceLlama) -> bool:
    """Return whether every compaction so far was decided by more than rounding."""
    return reference.smallest_margin > CLEAR_MARGIN


def rows_of(reference: ReferenceLlama) -> list[LayerRows]:
    """Return the rows of each layer."""
    hyper = reference.weights.hyperparameters
    heads = range(hyper.n_head_kv)
    return [
        (
            [reference.positions(layer, head) for head in heads],
            [reference.scores(layer, head) for head in heads],
        )
        for layer in range(hyper.n_layer)
    ]


def clear_steps(
    reference: ReferenceLlama,
    rng: np.random.Generator,
    sizes: Sequence[int | tuple[int, int]],
    *,
    margin: float = CLEAR_MARGIN,
) -> tuple[list[Step], ReferenceLlama]:
    """Return steps of a random text in which every choice is clear, and the reference after them.

    After a choice closer than `margin`, the tokens that led to it are sampled again. `sizes` are
    tokens of each step; negative to remove a tail; or a span to drop. The reference stays.
    """
    steps: list[Step] = []
    befores = [_copy(reference)]  # the reference before each step, and after the last
    n_close: dict[int, int] = {}
    n_searched = 0
    while len(steps) < len(sizes):
        now = _copy(befores[-1])
        with _watched_rounding() as distances:
            steps.append(_step(now, rng, sizes[len(steps)]))
        befores.append(now)
        if now.smallest_search_margin < CLEAR_SEARCH or min(distances) < CLEAR_ROUNDING:
            n_searched += 1
            assert n_searched < MOST_SEARCHES, "no text that is searched without close choices"
            del steps[-1], befores[-1]
        elif now.smallest_margin < margin:
            attempt = n_close[len(steps)] = n_close.get(len(steps), 0) + 1
            assert attempt < MOST_ATTEMPTS, "no text without close choices"
            # Rows were selected before this step was read: by the step before, or by earlier ones.
            n_left = max(0, len(steps) - 1 - attempt)
            del steps[n_left:], befores[n_left + 1 :]
    return steps, befores[-1]


@contextmanager
def _watched_rounding() -> Iterator[list[float]]:
    """Record the smallest distance of estimates from being rounded differently."""
    distances = [1.0]
    exactly = search.estimates

    def watched(pages: Sequence[codes.PageCodes], queries: FloatArray) -> FloatArray:
        groups = codes.hadamard(queries).reshape(len(queries), -1, codes.GROUP)
        most = np.abs(groups).sum(axis=-1)
        steps = 2 * most.max(axis=-1)[:, None, None] / codes.LARGEST
        entries = (groups @ codes.SIGNS.T + most[:, :, None]) / steps
        distances.append(float(np.abs(entries % 1 - 0.5).min()))
        return exactly(pages, queries)

    search.estimates = watched  # type: ignore[assignment]
    try:
        yield distances
    finally:
        search.estimates = exactly


def read(
    reference: ReferenceLlama, tokens: Sequence[int] | IntArray, *, ubatch: int = 512
) -> FloatArray:
    """Read tokens with the reference as `Llama.eval` does. Return logits [n_tokens, n_vocab].

    Chunks end when the cache is full, and every `slack` tokens from the start of the text or from
    the last time it was full.
    """
    eviction = reference.eviction
    assert eviction is not None
    logits: list[FloatArray] = []
    while len(tokens):
        n_rows, size = reference.n_rows, eviction.slack
        n_since = n_rows if n_rows == reference.n_tokens else n_rows - eviction.budget
        room = min(eviction.capacity - n_rows, size - n_since % size) or size
        logits.append(reference.eval(tokens[:room], ubatch=ubatch))
        tokens = tokens[room:]
    return np.concatenate(logits) if logits else reference.eval(tokens)


def _copy(reference: ReferenceLlama) -> ReferenceLlama:
    """Return an independent copy with the same weights."""
    return copy.deepcopy(reference, {id(reference.weights): reference.weights})


def _step(reference: ReferenceLlama, rng: np.random.Generator, size: int | tuple[int, int]) -> Step:
    n_vocab = len(reference.weights.embedding)
    dropped, size = (size, 0) if isinstance(size, tuple) else ((), size)
    if dropped:
        reference.drop_spans([dropped])
    if size < 0:
        reference.remove(reference.n_tokens + size)
    tokens = rng.integers(0, n_vocab, max(0, size))
    logits = read(reference, tokens)
    return Step(
        tokens.tolist(),
        reference.n_tokens,
        logits,
        rows_of(reference),
        reference.found_weights.copy(),
        reference.found_share,
        dropped,
    )


def do_step(llm: Llama, step: Step) -> None:
    """Repeat a step of the reference."""
    if step.dropped:
        llm.text.drop_spans([step.dropped])
    elif step.n_tokens < llm.n_tokens:
        assert llm.text.remove_tail(step.n_tokens)
    else:
        llm.eval(step.tokens)


def assert_same_steps(
    llm: Llama, steps: Sequence[Step], *, logits: float = 1e-4, scores: float = 1e-4
) -> None:
    """Check logits, rows and scores of every step, within these tolerances."""
    for step in steps:
        do_step(llm, step)
        assert llm.n_tokens == step.n_tokens
        mine = llm.scores[llm.n_tokens - len(step.tokens) : llm.n_tokens]
        np.testing.assert_allclose(mine, step.logits, atol=logits, rtol=0)
        where = f"after {llm.n_tokens} tokens"
        assert_same_rows(llm.kv_rows, step.rows, scores=scores, where=where)


def assert_same_rows(
    rows_of_layer: Callable[[int], LayerRows],
    expected: Sequence[LayerRows],
    *,
    scores: float = 1e-4,
    where: str = "",
) -> None:
    """Check for equal positions, and equal scores up to rounding, of every (layer, KV head)."""
    for layer, (positions, collected) in enumerate(expected):
        mine = rows_of_layer(layer)
        assert len(mine[0]) == len(positions)
        for head in range(len(positions)):
            pair = f"layer {layer}, KV head {head} {where}"
            np.testing.assert_array_equal(mine[0][head], positions[head], err_msg=pair)
            np.testing.assert_allclose(
                mine[1][head], collected[head], atol=scores, rtol=scores, err_msg=pair
            )


def shared_rows(llm: Llama, reference: ReferenceLlama) -> list[float]:
    """Return, for every (layer, KV head), the share of kept rows that the reference also keeps."""
    return [
        len(np.intersect1d(mine, theirs)) / len(mine)
        for layer, (positions, _) in enumerate(rows_of(reference))
        for mine, theirs in zip(llm.kv_rows(layer)[0], positions, strict=True)
    ]
