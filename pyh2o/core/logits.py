"""Logits that are no numbers: nothing can be drawn from them, and llama.cpp's samplers would."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..errors import DecodeError

LogitsArray = npt.NDArray[np.single]


def are_numbers(logits: LogitsArray) -> bool:
    """Whether a token can be drawn from logits.

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
            "the output of the model is infinite or no number, so that no token can be drawn: its "
            "file is damaged or was converted wrongly; get it again, or use another model"
        )
