"""What texts begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = Sequence[int] | npt.NDArray[Any]


def is_beginning(tokens: npt.NDArray[Any], of: npt.NDArray[Any]) -> bool:
    """Whether a text begins with these tokens."""
    return len(tokens) <= len(of) and bool(np.array_equal(tokens, of[: len(tokens)]))


def n_common(a: Tokens, b: Tokens) -> int:
    """How many of the first tokens, or bytes, of two texts are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if differ.size else n
