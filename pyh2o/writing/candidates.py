"""The tokens of a vocabulary with their logits, for samplers and grammars to choose from."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

_CANDIDATE = np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)], align=True)


class Candidates:
    """All tokens of a vocabulary with [n_vocab] logits, valid until a sampler sorts them."""

    def __init__(self, logits: npt.NDArray[np.single]) -> None:
        """Copy the logits; [n_vocab]."""
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

    @property
    def n_left(self) -> int:
        return int(self._array.size)

    @property
    def selected(self) -> int:
        """Token chosen by a sampler."""
        return int(self._array.data[self._array.selected].id)

    def apply(self, sampler: Any) -> None:
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(self._array))
