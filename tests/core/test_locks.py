"""Operations that would end the process raise an error with a fix instead."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyh2o import Llama
from pyh2o.errors import BusyError, ClosedError, ForkedError
from tiny_llama import tiny_llama

MODEL: dict[str, Any] = {"seed": 4}


@pytest.fixture(params=[True, False], ids=["evicting", "full"])
def llm(request: pytest.FixtureRequest, path: Path) -> Iterator[Llama]:
    with tiny_llama(path, n_ctx=256, evict=request.param) as llm:
        llm.eval([1, 2, 3])
        yield llm


CALLS: dict[str, Callable[[Llama], Any]] = {
    "eval": lambda llm: llm.eval([4]),
    "sample": lambda llm: llm.sample(),
    "generate": lambda llm: next(llm.generate([1, 2, 3, 4])),
    "completion": lambda llm: llm("once", max_tokens=1),
    "reset": lambda llm: llm.reset(),
    "kv": lambda llm: llm.kv,
    "kv_rows": lambda llm: llm.kv_rows(0),
    "heavy_hitters": lambda llm: llm.heavy_hitters(),
    "room_in_batch": lambda llm: llm.text.room_in_batch(),
    "recalled": lambda llm: llm.recalled(),
    "pin_spans": lambda llm: llm.pin_spans([(1, 2)]),
    "share_fairly": lambda llm: llm.share_fairly([1]),
    "can_remove_tail": lambda llm: llm.text.can_remove_tail(1),
    "remove_tail": lambda llm: llm.text.remove_tail(1),
    "drop_surplus": lambda llm: llm.text.drop_surplus(),
    "kv_state": lambda llm: llm.kv_state(),
    "load_kv_state": lambda llm: llm.load_kv_state(b"", []),
    "save_state": lambda llm: llm.save_state(),
}
# These read the model only, which any thread may do.
OF_THE_MODEL: dict[str, Callable[[Llama], Any]] = {
    "tokenize": lambda llm: llm.tokenize(b"once"),
    "detokenize": lambda llm: llm.detokenize([40, 41]),
    "token_eos": lambda llm: llm.token_eos(),
    "pooling_type": lambda llm: llm.pooling_type(),
}


def test_a_closed_model_is_reported(llm: Llama) -> None:
    llm.close()
    llm.close()  # closing twice is allowed, as for files
    for call in {**CALLS, **OF_THE_MODEL}.values():
        with pytest.raises(ClosedError, match="load it again"):
            call(llm)


def test_a_model_in_use_by_another_thread_is_reported(llm: Llama) -> None:
    """Another thread is reading a prompt: operations that would disturb it are refused."""
    reading, may_go_on = threading.Event(), threading.Event()

    def wait(_done: int, _total: int) -> None:
        reading.set()
        assert may_go_on.wait(60)

    llm.text.prompt_progress = wait
    thread = threading.Thread(target=lambda: llm.eval([5, 6, 7]))
    thread.start()
    try:
        assert reading.wait(60)
        for call in (*CALLS.values(), Llama.close):
            with pytest.raises(BusyError, match="in use by another thread: share it"):
                call(llm)
        for call in OF_THE_MODEL.values():
            call(llm)
    finally:
        may_go_on.set()
        thread.join()
    assert llm.n_tokens == 6
    llm.text.prompt_progress = None
    llm.eval([8])


def test_changing_a_text_during_its_generation_is_refused(llm: Llama) -> None:
    tokens = llm.generate([1, 2, 3, 4])
    next(tokens)
    llm.reset()
    with pytest.raises(BusyError, match="finish a generation before"):
        next(tokens)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_use_in_a_forked_process_is_refused(llm: Llama) -> None:
    child = os.fork()
    if child == 0:
        n_refused = 0
        for call in {**CALLS, **OF_THE_MODEL}.values():
            with contextlib.suppress(ForkedError):
                call(llm)
                os._exit(1)
            n_refused += 1
        llm.close()
        os._exit(0 if n_refused == len(CALLS) + len(OF_THE_MODEL) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    llm.eval([4])
