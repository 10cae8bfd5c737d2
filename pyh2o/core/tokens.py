"""Comparison of token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = Sequence[int] | npt.NDArray[Any]


def n_common(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix of two token or byte sequences."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differ = np.asarray(a[:n]) != np.asarray(b[:n])
    first = int(differ.argmax())  # ends at the first difference
    return first if differ[first] else n
