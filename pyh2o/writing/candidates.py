"""Tokens that may come next, in the form in which llama.cpp's samplers take them."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

_CANDIDATE = np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)], align=True)


class Candidates:
    """All tokens of a vocabulary with their logits.

    Attributes:
        logits: of the tokens, as the samplers that do not sort them left them; [n_vocab].
    """

    def __init__(self, logits: npt.NDArray[np.single]) -> None:
        """A copy of these logits; [n_vocab]."""
        self._data = np.zeros(len(logits), dtype=_CANDIDATE)
        self._data["id"] = np.arange(len(logits))
        self._data["logit"] = logits
        self._array = llama_cpp.llama_token_data_array(
            data=self._data.ctypes.data_as(llama_cpp.llama_token_data_p),
            size=len(logits),
            selected=-1,
            sorted=False,
        )
        self.logits: npt.NDArray[np.single] = self._data["logit"]

    def apply(self, sampler: Any) -> None:
        """Let one of llama.cpp's samplers, or a chain of them, work on them."""
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self._array))

    def draw(self, chain: Any) -> int:
        """The token that a chain of samplers chooses, which goes on after it."""
        self.apply(chain)
        token = int(self._array.data[self._array.selected].id)
        llama_cpp.llama_sampler_accept(chain, token)
        return token
