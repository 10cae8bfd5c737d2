"""Draws tokens after the text in a model's cache, and can go on with what another run has drawn.

The random numbers of llama.cpp's `dist` sampler come from a Mersenne twister that cannot be read or
set. But the sampler takes exactly one number for each token, whatever the choice is
(`llama_sampler_dist_apply` in llama-sampler.cpp), so its state after n tokens is reached by letting
it draw n times from a single candidate.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import llama_cpp

from ..llama import Llama
from ..text.vocabulary import is_end_token
from .logits import LogitsProcessor
from .sampling import Sampling


class Writer:
    """Draws tokens after the text in a model's cache, feeding it only what is new.

    The draws are those of `Llama.generate` with the same sampling and seed.

    Attributes:
        before_end: called when all but the end of the first tokens is evaluated (see `Llama.read`).
    """

    def __init__(
        self,
        llm: Llama,
        sampling: Sampling,
        *,
        written: Sequence[int] = (),
        logits_processor: LogitsProcessor | None = None,
    ) -> None:
        """Start drawing, or go on after what an earlier writer of the same sampling has drawn.

        Args:
            llm: the model; nothing is evaluated yet.
            sampling: how tokens are drawn.
            written: all tokens that the earlier writer has drawn: penalties and random numbers go
                on exactly after them.
            logits_processor: called before each draw.

        Raises:
            BusyError: another thread uses the model.
        """
        self._llm = llm
        self.before_end: Callable[[], None] | None = None
        self._sampler = _sampler(llm, sampling, logits_processor)
        if sampling.temperature > 0:
            _skip_random_numbers(self._sampler, len(written))
        for token in written[-llm.last_n_tokens_size :]:
            self._sampler.accept(token)

    def write(self, tokens: Sequence[int]) -> Generator[int, None, None]:
        """Evaluate `tokens`, then draw one token after the other, for ever.

        A drawn token is evaluated when the next one is asked for. So when this is closed early, the
        last token is still to be evaluated: begin the next call with it. The tokens end
        with one that means "end of text", which is not evaluated, or when no position is left.

        Args:
            tokens: at least one.

        Raises:
            ValueError: no tokens.
            ContextLimitError: there are no positions for `tokens`.
            BusyError: another thread uses the model.
        """
        if not tokens:
            raise ValueError("there are no logits to draw from: evaluate at least one token")
        llm = self._llm
        read: Callable[..., None] = functools.partial(llm.read, before_end=self.before_end)
        while True:
            with llm.guard:  # until a token is drawn, the logits must stay those of this text
                read(tokens)
                token = int(self._sampler.sample(llm._ctx, -1))
            read = llm.eval
            yield token
            if is_end_token(llm, token) or llm.n_tokens >= llm.position_limit:
                return
            tokens = [token]


def _sampler(llm: Llama, sampling: Sampling, logits_processor: LogitsProcessor | None) -> Any:
    """The chain of samplers that `Llama.generate` would use."""
    with llm.guard:  # another thread would draw with this seed
        seed_of_model = llm._seed
        llm.set_seed(sampling.seed)
        try:
            return llm._init_sampler(
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                typical_p=sampling.typical_p,
                temp=sampling.temperature,
                repeat_penalty=sampling.repeat_penalty,
                frequency_penalty=sampling.frequency_penalty,
                presence_penalty=sampling.presence_penalty,
                logits_processor=None if logits_processor is None else [logits_processor],
            )
        finally:
            llm.set_seed(seed_of_model)


def _skip_random_numbers(sampler: Any, count: int) -> None:
    """Let the `dist` sampler, the last of the chain, draw `count` times."""
    last = llama_cpp.llama_sampler_chain_n(sampler.sampler) - 1
    dist = llama_cpp.llama_sampler_chain_get(sampler.sampler, last)
    candidate = llama_cpp.llama_token_data(id=0, logit=0.0, p=0.0)
    candidates = llama_cpp.llama_token_data_array(
        data=ctypes.pointer(candidate), size=1, selected=-1, sorted=False
    )
    for _ in range(count):
        llama_cpp.llama_sampler_apply(dist, ctypes.byref(candidates))
