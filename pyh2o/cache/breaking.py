"""A batch that is broken off while it is computed: by Ctrl-C, or whoever else wants to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .._native import ffi, lib

# Microseconds between two questions. A node of the graph may take longer: nobody is asked within.
INTERVAL = 100_000


@dataclass
class _Question:
    """Whether to break off.

    Attributes:
        check: raises something if so.
        answer: what was raised.
    """

    check: Callable[[], None] | None
    answer: BaseException | None = None


@contextmanager
def breakable(context_address: int, check: Callable[[], None] | None) -> Iterator[None]:
    """Let the batches that are decoded inside be broken off (see llama_h2o_set_breaker).

    Python runs the handler of a signal between two of its own steps, and has none to take while
    llama.cpp computes. So that asks here from time to time. What a handler raises breaks the batch
    off, and so does what `check` raises; the cache is then as it was before that batch.

    Args:
        context_address: of the `llama_context`.
        check: called then, in the same thread; it must not use the context.

    Raises:
        BaseException: what broke it off, in the place of the error of llama_decode.
    """
    context = ffi.cast("struct llama_context *", context_address)
    question = _Question(check)
    handle = ffi.new_handle(question)
    breaker = ffi.new("struct llama_h2o_breaker *", [lib.pyh2o_ask, handle, INTERVAL, 0])
    lib.llama_h2o_set_breaker(context, breaker)
    try:
        yield
    except RuntimeError:
        if question.answer is None:
            raise
    finally:
        lib.llama_h2o_set_breaker(context, ffi.NULL)
    if question.answer is not None:
        raise question.answer


def _ask(data: Any) -> bool:
    check = ffi.from_handle(data).check
    if check is not None:
        check()
    return False


def _break_off(_kind: type[BaseException], error: BaseException, trace: TracebackType) -> bool:
    """Keeps what was raised: no exception can pass through llama.cpp."""
    ffi.from_handle(trace.tb_frame.f_locals["data"]).answer = error
    return True


# A handler may raise before the first step of `_ask`: a `try` there would come too late.
ffi.def_extern(name="pyh2o_ask", onerror=_break_off)(_ask)
