"""Drafts for speculative decoding, cut to what can be taken back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

if TYPE_CHECKING:
    from ..llama import Llama


class FittingDrafts(LlamaDraftModel):  # type: ignore[misc]  # llama_cpp is not typed
    """A draft model whose drafts fit the cache and one batch.

    Drafts are evaluated all at once, and those that turn out wrong are removed again. A compaction
    amid them could evict rows that the text without them still needs, and the end of a batch would
    take their logits.

    Attributes:
        model: the draft model it stands for.
    """

    def __init__(self, model: Any, llama: Llama) -> None:
        self.model = model
        # No cycle: a model's memory is freed with its last reference.
        self._llama = weakref.proxy(llama)

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """Guess how the tokens go on; the last of them are not evaluated yet."""
        n_certain = len(input_ids) - self._llama.n_tokens
        room = self._llama.room_in_batch() - n_certain
        drafts: npt.NDArray[np.intc] = self.model(input_ids, **kwargs)[: max(0, room)]
        return drafts
