"""Abort a batch while llama.cpp computes it: on Ctrl-C, or when a callback raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .._native import ffi, lib

# Microseconds between two checks. They run between graph nodes, one of which may take longer.
INTERVAL = 100_000


@dataclass
class _AbortCheck:
    """A callback that aborts the batch by raising, and the error that it raised."""

    check: Callable[[], None] | None
    error: BaseException | None = None


@contextmanager
def abortable(context_address: int, check: Callable[[], None] | None) -> Iterator[None]:
    """Make batches abortable that are decoded inside the block (see llama_h2o_set_breaker).

    Python runs signal handlers between its own bytecode instructions, so none runs while llama.cpp
    computes. llama.cpp therefore calls back into Python every INTERVAL. If a signal handler or
    `check` raises, the batch is aborted and the cache is restored to its state before the batch.

    Args:
        check: called in the same thread; it must not use the context.

    Raises:
        BaseException: the error that aborted the batch, instead of llama_decode's.
    """
    context = ffi.cast("struct llama_context *", context_address)
    abort_check = _AbortCheck(check)
    handle = ffi.new_handle(abort_check)
    breaker = ffi.new("struct llama_h2o_breaker *", [lib.pyh2o_ask, handle, INTERVAL, 0])
    lib.llama_h2o_set_breaker(context, breaker)
    try:
        yield
    except RuntimeError:
        if abort_check.error is None:
            raise
    finally:
        lib.llama_h2o_set_breaker(context, ffi.NULL)
    if abort_check.error is not None:
        raise abort_check.error


def _ask(data: Any) -> bool:
    check = ffi.from_handle(data).check
    if check is not None:
        check()
    return False


def _abort(_kind: type[BaseException], error: BaseException, trace: TracebackType) -> bool:
    """Record the error, as no exception can pass through llama.cpp, and abort."""
    ffi.from_handle(trace.tb_frame.f_locals["data"]).error = error
    return True


# A signal handler may raise before the first instruction of `_ask`, where no `try` can catch it.
ffi.def_extern(name="pyh2o_ask", onerror=_abort)(_ask)
