"""Errors of evaluation and sampling, with the cause from llama.cpp's log."""

from __future__ import annotations

import ctypes
import math
import threading

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp._logger import llama_log_callback

from ..cache.scoring import take_error
from ..errors import DecodeError

LogitsArray = npt.NDArray[np.single]

# The error of a compaction if attention is infinite or NaN (h2o-device-choice.cpp).
NO_NUMBERS = "the attention of the model is infinite or no number"
_DAMAGED = "its file is damaged or was converted wrongly; get it again, or use another model"
_ERROR = 4  # of ggml_log_level


class _LastError(threading.local):
    """The first error in llama.cpp's log since the start of a batch, in this thread."""

    line = ""


_last_error = _LastError()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _record_error(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if level == _ERROR and not _last_error.line:
        _last_error.line = text.decode(errors="replace").strip()
    llama_log_callback(level, text, user_data)


llama_cpp.llama_log_set(_record_error, ctypes.c_void_p(0))


def clear_errors() -> None:
    _last_error.line = ""
    take_error()


def decode_error(status: int) -> BaseException:
    """Return a DecodeError for a status of llama_decode, or the policy's error at a compaction."""
    raised = take_error()
    if raised is not None:
        return raised
    line = _last_error.line
    if line.endswith(NO_NUMBERS):
        return DecodeError(f"{NO_NUMBERS}, so that rows cannot be scored: {_DAMAGED}")
    # the line starts with the name of a function
    cause = f": {line.partition(': ')[2] or line}" if line else ""
    return DecodeError(
        f"llama.cpp failed to evaluate the tokens (llama_decode returned {status}){cause}; "
        "see its log with verbose=True (--verbose)"
    )


def are_numbers(logits: LogitsArray) -> bool:
    """Return whether a token can be sampled from [n_vocab] logits, which llama.cpp assumes."""
    return math.isfinite(logits.max())


def check_logits(logits: LogitsArray) -> None:
    """Raise a DecodeError if no token can be sampled (see `are_numbers`)."""
    if not are_numbers(logits):
        raise DecodeError(
            "the output of the model is infinite or NaN, so that no token can be sampled: "
            f"{_DAMAGED}"
        )
