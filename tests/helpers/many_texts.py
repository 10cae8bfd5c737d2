"""Texts that are read and generated concurrently, each in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pyh2o import Llama
from pyh2o.compat.results import Results, usage_json
from pyh2o.engine import Engine
from pyh2o.engine.engine import Terms
from pyh2o.writing.request import Request
from pyh2o.writing.sampler import SamplerSettings
from pyh2o.writing.thinking import Thinking
from tiny_llama import ONE_THREAD, PAPER

Result = TypeVar("Result")

PATIENCE = 60


def tiny_engine(path: Path, **settings: Any) -> Engine:
    """Return an engine with the settings of `tiny_llama`."""
    return Engine(str(path), **ONE_THREAD, **PAPER | settings)


@contextmanager
def llama_in(engine: Engine, *args: Any, **terms: Any) -> Iterator[Llama]:
    """Return a `Llama` over the text of a slot, which is its `slot`."""
    with engine.slot(*args, **terms) as slot:
        llama = Llama.of(slot.text)
        llama.slot = slot
        yield llama


def ask(engine: Engine, given: Any, *, terms: Terms | None = None, **arguments: Any) -> Any:
    """Return the result of a prompt or of messages, or a stream's chunks, with the usage last."""
    is_chat = isinstance(given, list) and all(isinstance(each, dict) for each in given)
    said = {"messages": given} if is_chat else {"prompt": given}
    stream, budget = arguments.pop("stream", False), arguments.pop("reasoning_budget", None)
    names = {"temperature", "seed", "repeat_penalty"} & arguments.keys()
    sampling = SamplerSettings(
        **{"seed": engine.new_seed(), **{n: arguments.pop(n) for n in names}}
    )
    processor = arguments.pop("logits_processor", None)
    request = Request(
        sampling=sampling,
        reasoning=Thinking(budget=budget),
        logits_processors=[] if processor is None else [processor],
        **said,
        **arguments,
    )
    results = Results("tiny", is_chat=is_chat, top_logprobs=request.top_logprobs)
    events = engine.answer(request, terms or Terms())
    if stream:
        return _chunks(results, events)
    choice = results.choice(events)
    return results.result([choice], _usage(results))


def _usage(results: Results) -> dict[str, Any]:
    usage = usage_json(results.usage)
    usage["prompt_tokens_details"].setdefault("dropped_tokens", 0)
    return usage


def _chunks(results: Results, events: Any) -> Iterator[Any]:
    for chunk in results.chunks(events):
        yield {**chunk, "usage": _usage(results)}


def at_once(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run functions concurrently and return their results."""
    with ThreadPoolExecutor(len(works)) as threads:
        futures = [threads.submit(work) for work in works]
        return [future.result(PATIENCE) for future in futures]


def read_by_pieces(llm: Llama, pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the logits after each chunk of a text; [n_pieces, n_vocab]."""
    logits = []
    for piece in pieces:
        llm.eval(piece)
        logits.append(llm.scores[llm.n_tokens - 1].copy())
    return np.array(logits)


def random_pieces(rng: np.random.Generator, n_vocab: int, n_tokens: int) -> list[list[int]]:
    """Return a text in chunks: first a prompt, then mostly single tokens."""
    pieces = [rng.integers(3, n_vocab, int(rng.integers(1, n_tokens // 2))).tolist()]
    while sum(map(len, pieces)) < n_tokens:
        size = int(rng.choice([1, 1, 1, 1, 7]))
        pieces.append(rng.integers(3, n_vocab, size).tolist())
    return pieces
