"""Logits that are no numbers: nothing can be drawn from them, and llama.cpp's samplers would."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import DecodeError, SettingsError
from .candidates import Candidates

if TYPE_CHECKING:
    import llama_cpp

LogitsArray = npt.NDArray[np.single]
# (token ids so far [n_tokens], logits [n_vocab]) to logits, as in llama_cpp.
LogitsProcessor = Callable[[npt.NDArray[np.intc], LogitsArray], LogitsArray]


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


class CheckedSampler:
    """llama_cpp's chain of samplers, which looks at the logits first.

    It calls logits processors itself. llama_cpp's class has C call them, where nothing can be
    raised: an error or Ctrl-C would be lost, and a token drawn from logits as they are.
    """

    def __init__(
        self, chain: Any, llama: llama_cpp.Llama, processors: Sequence[LogitsProcessor]
    ) -> None:
        """`chain` has no processors; what `processors` raise comes out of `sample`."""
        self._chain = chain
        self._processors = processors
        # No cycle: the model keeps its newest sampler.
        self._llama = weakref.proxy(llama)
        self._n_vocab = llama.n_vocab()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    def sample(self, context: Any, idx: int = -1) -> int:
        """Draw a token.

        Args:
            context: llama_cpp's, which has the logits.
            idx: of its last evaluation's logits.

        Raises:
            DecodeError: they are no numbers.
            SettingsError: the processors leave no token.
        """
        logits = _logits_of(context, idx, self._n_vocab)
        check_logits(logits)
        if not self._processors:
            return int(self._chain.sample(context, idx))
        candidates = Candidates(logits)
        for processor in self._processors:
            candidates.logits[:] = processor(self._llama._input_ids, candidates.logits)
        if not candidates.logits.max() > -math.inf:
            raise SettingsError(
                "the logits processors, or logit_bias, leave no token to draw: give a number for "
                "every token, and for one of them more than minus infinity"
            )
        return candidates.draw(self._chain.sampler)


def last_logits(llm: llama_cpp.Llama) -> LogitsArray:
    """Those of the last token that was evaluated, as long as no other is; [n_vocab]."""
    return _logits_of(llm._ctx, -1, llm.n_vocab())


def _logits_of(context: Any, idx: int, n_vocab: int) -> LogitsArray:
    logits: LogitsArray = np.ctypeslib.as_array(context.get_logits_ith(idx), (n_vocab,))
    return logits
