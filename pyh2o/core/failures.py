"""Why tokens cannot be evaluated or drawn, which llama.cpp says in its log alone."""

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

# What a compaction says of attention that rows cannot be put in order by (h2o-compaction.cpp).
NO_NUMBERS = "the attention of the model is infinite or no number"
_DAMAGED = "its file is damaged or was converted wrongly; get it again, or use another model"
# Of ggml_log_level.
_ERROR = 4


class _Heard(threading.local):
    """What llama.cpp has called an error, in this thread: the first line since a batch began."""

    line = ""


_heard = _Heard()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _listen(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if level == _ERROR and not _heard.line:
        _heard.line = text.decode(errors="replace").strip()
    llama_log_callback(level, text, user_data)


llama_cpp.llama_log_set(_listen, ctypes.c_void_p(0))


def forget_errors() -> None:
    """Forget what was said of batches before."""
    _heard.line = ""
    take_error()


def decode_error(status: int) -> BaseException:
    """Why a batch has failed in this thread.

    Args:
        status: what llama_decode has returned.

    Returns:
        DecodeError, or what the policy has raised at a compaction.
    """
    raised = take_error()
    if raised is not None:
        return raised
    said = _heard.line
    if said.endswith(NO_NUMBERS):
        return DecodeError(f"{NO_NUMBERS}, so that no rows can be chosen: {_DAMAGED}")
    # what comes first is the name of a function
    cause = f": {said.partition(': ')[2] or said}" if said else ""
    return DecodeError(
        f"llama.cpp could not evaluate the tokens (llama_decode returned {status}){cause}; "
        "verbose=True (--verbose) shows its log"
    )


def are_numbers(logits: LogitsArray) -> bool:
    """Whether a token can be drawn from logits; llama.cpp's samplers would in any case.

    Args:
        logits: of all tokens; [n_vocab]. One may be minus infinity: that token is never drawn.
    """
    return math.isfinite(logits.max())


def check_logits(logits: LogitsArray) -> None:
    """Refuse to draw a token where its logit, or another one, is infinite or no number.

    Args:
        logits: see `are_numbers`.

    Raises:
        DecodeError: they are no numbers.
    """
    if not are_numbers(logits):
        raise DecodeError(
            "the output of the model is infinite or no number, so that no token can be drawn: "
            f"{_DAMAGED}"
        )
