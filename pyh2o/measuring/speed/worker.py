"""One process with one cache, which does what it is told and says how long it took."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from ...system.memory import own_bytes
from ..caches import open_llama
from .messages import Command, Done, Failed, Generate, GoBack, KVUse, Read, Ready, Start

# Tokens that are evaluated before the first measurement, as a prompt and one at a time.
WARM_UP = (8, 2)


class Model(Protocol):
    """A model with the cache that is measured."""

    @property
    def position(self) -> int:
        """Tokens of text so far."""

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        """Evaluate tokens of a prompt; `last` says that generation comes next."""

    def generate(self, token: int) -> None:
        """Evaluate one token."""

    def go_back(self, position: int) -> None:
        """Forget the text after this position, if the cache can; always so for 0."""

    def use(self) -> KVUse:
        """What the cache takes now."""


class LlamaModel:
    """llama.cpp, with the full cache or this runtime's."""

    def __init__(self, start: Start) -> None:
        import llama_cpp

        from ...llama import KV_TYPES

        cache = start.cache
        kv_type = KV_TYPES[cache.kv_type]
        # Left out, this runtime takes what is best for it. llama.cpp's windows are faster with no
        # more cells than they need, which is not the default of llama-cpp-python.
        stock = {}
        if cache.is_full:
            stock = {"evict": False, "flash_attn": cache.flash_attention, "swa_full": False}
        self._llm = open_llama(
            start.model,
            cache,
            window=cache.cells if cache.is_full else start.window,
            compute=start.compute,
            type_k=kv_type,
            type_v=kv_type,
            **stock,
        )
        # A GPU may still be computing when an evaluation returns.
        self._synchronize: Callable[[Any], None] = llama_cpp.llama_synchronize

    @property
    def position(self) -> int:
        return self._llm.n_tokens

    def read(self, tokens: Sequence[int], *, last: bool) -> None:
        self._llm.eval(tokens)
        self._synchronize(self._llm.ctx)

    def generate(self, token: int) -> None:
        self._llm.eval([token])
        self._synchronize(self._llm.ctx)

    def go_back(self, position: int) -> None:
        if position == 0:
            self._llm.reset()
        else:
            self._llm.remove_tail(position)

    def use(self) -> KVUse:
        kv = self._llm.kv
        return KVUse(
            bytes_rows=kv.bytes_k + kv.bytes_v,
            bytes_scores=kv.bytes_scores,
            cells=kv.cells,
            used=kv.used + min(kv.limits.recall, kv.archived),
            bytes_device=self._llm.device_bytes,
            compactions=kv.compactions,
            compaction_seconds=kv.compaction_seconds,
            bytes_archive=kv.bytes_archive,
            found_share=kv.found_share if self._llm.recalls else None,
            bytes_fixed=kv.bytes_fixed,
        )


def serve(connection: Connection) -> None:
    """Do what the process at the other end says, until it hangs up or something goes wrong."""
    try:
        try:
            start: Start = connection.recv()
            model = open_model(start)
            warm_up(model, start.tokens)
            connection.send(Ready(model.use(), own_bytes()))
            while True:
                command: Command = connection.recv()
                connection.send(perform(model, command, start.tokens))
        except (EOFError, BrokenPipeError):
            return
        except Exception as error:
            message = " ".join(str(error).split())
            connection.send(Failed(message or type(error).__name__))
    except BrokenPipeError:
        return


def open_model(start: Start) -> Model:
    """The model and cache that were asked for.

    Raises:
        PyH2OError: the model or the cache is refused.
    """
    if start.cache.kind in ("full", "evicting"):
        return LlamaModel(start)
    if start.cache.kind == "openvino":
        from .openvino_worker import open_openvino

        return open_openvino(start)
    from .transformers_worker import open_transformers

    return open_transformers(start)


def warm_up(model: Model, tokens: Sequence[int]) -> None:
    """Use every path once, so that what is done only once is not measured."""
    n_prompt, n_single = WARM_UP
    model.read(tokens[:n_prompt], last=True)
    for token in tokens[:n_single]:
        model.generate(token)
    model.go_back(0)


def perform(model: Model, command: Command, tokens: Sequence[int]) -> Done:
    """Carry out one command, and take the time of the evaluations alone."""
    before = model.use()
    position = model.position
    seconds = 0.0
    if isinstance(command, GoBack):
        model.go_back(command.position)
    else:
        part = tokens[position : position + command.tokens]
        started = time.perf_counter()
        if isinstance(command, Generate):
            for token in part:
                model.generate(token)
        elif isinstance(command, Read):
            model.read(part, last=command.last)
        seconds = time.perf_counter() - started
    return Done(seconds, model.position, before, model.use(), peak_bytes())


def peak_bytes() -> int:
    """Most memory of this process that was in RAM at any time.

    Linux counts the parent's memory in `ru_maxrss` of a process that it started.
    """
    if (status := Path("/proc/self/status")).exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
