"""Drafts for speculative decoding, cut to what can be taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

if TYPE_CHECKING:
    from ..core.text import Text


class FittingDrafts(LlamaDraftModel):  # type: ignore[misc]  # llama_cpp is not typed
    """A draft model whose drafts fit the cache and one batch.

    Drafts are evaluated all at once, and those that turn out wrong are removed again. A compaction
    amid them could evict rows that the text without them still needs, and the end of a batch would
    take their logits.

    Attributes:
        model: the draft model it stands for.
    """

    def __init__(self, model: Any, text: Text) -> None:
        self.model = model
        self._text = text

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """Guess how the tokens go on; the last of them are not evaluated yet."""
        n_certain = len(input_ids) - self._text.n_tokens
        room = self._text.room_in_batch() - n_certain
        drafts: npt.NDArray[np.intc] = self.model(input_ids, **kwargs)[: max(0, room)]
        return drafts
