"""A writer that samples the same few tokens repeatedly, whatever the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyh2o import Llama
from pyh2o.writing import answer
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.writer import Writer

CYCLE = (300, 310, 320)


class Cycling(Writer):
    """The length of the text determines the next token."""

    def __init__(self, llm: Llama, sampling: Sampling, **before: Any) -> None:
        def only_next(
            tokens: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
        ) -> npt.NDArray[np.single]:
            logits[:] = -np.inf
            logits[CYCLE[len(tokens) % len(CYCLE)]] = 0
            return logits

        super().__init__(llm, sampling, **{**before, "logits_processor": only_next})


def let_answers_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample all answers of conversations this way."""
    monkeypatch.setattr(answer, "Writer", Cycling)
