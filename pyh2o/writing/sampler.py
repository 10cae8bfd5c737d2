"""Draws tokens from logits with llama.cpp's samplers, and never from what is no number."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import LlamaGrammar
from llama_cpp import _internals as internals

from ..core.failures import LogitsArray, check_logits
from ..core.model import Model
from ..errors import SettingsError
from .chat_guide import ChatGuide
from .grammar import GrammarGuard
from .sampling import Sampling

# (token ids so far [n_tokens], logits [n_vocab]) to logits, as in llama_cpp.
LogitsProcessor = Callable[[npt.NDArray[np.intc], LogitsArray], LogitsArray]

_CANDIDATE = np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)], align=True)
# Tokens over which mirostat estimates, as in llama_cpp.
_MIROSTAT_TOKENS = 100


@dataclass(frozen=True)
class Draws(Sampling):
    """Settings of llama.cpp's samplers, as llama_cpp has them: none is refused.

    Attributes:
        temperature: 0 always takes the likeliest token; below 0 draws from all of them.
        mirostat_mode: 1 or 2, in the place of top_k, typical_p, top_p and min_p; 0 for none.
        last_tokens: so many drawn tokens are penalised.
    """

    repeat_penalty: float = 1.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    last_tokens: int = 64

    def __post_init__(self) -> None:
        """Refuse nothing."""


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


class Sampler:
    """A chain of llama.cpp's samplers, with a logits processor and a grammar before it.

    It calls the processor itself. llama_cpp has C call them, where nothing can be raised: an error
    or Ctrl-C would be lost, and a token drawn from logits as they are.
    """

    def __init__(
        self,
        model: Model,
        draws: Sampling,
        *,
        processor: LogitsProcessor | None = None,
        grammar: LlamaGrammar | ChatGuide | None = None,
    ) -> None:
        """Nothing has been drawn yet.

        Raises:
            GrammarError: the grammar is wrong, or too large.
        """
        self._draws = draws if isinstance(draws, Draws) else Draws(**vars(draws))
        self._chain = _chain(self._draws, model.n_vocab)
        self._processor = processor
        self._grammar: GrammarGuard | ChatGuide | None = None
        if isinstance(grammar, ChatGuide):
            self._grammar = grammar
        elif grammar is not None:
            self._grammar = GrammarGuard(model, grammar)

    def draw(self, logits: LogitsArray, tokens: npt.NDArray[np.intc]) -> int:
        """Draw a token.

        Args:
            logits: of all tokens; [n_vocab].
            tokens: of the text so far, for the processor; [n_tokens].

        Raises:
            DecodeError: the logits are no numbers.
            SettingsError: the processor leaves no token.
            GrammarError: the grammar allows none.
        """
        check_logits(logits)
        candidates = Candidates(logits)
        if self._processor is not None:
            candidates.logits[:] = self._processor(tokens, candidates.logits)
        if self._grammar is not None:
            self._grammar.mask(candidates)
        if not candidates.logits.max() > -math.inf:
            raise SettingsError(
                "the logits processors, or logit_bias, leave no token to draw: give a number for "
                "every token, and for one of them more than minus infinity"
            )
        token = candidates.draw(self._chain.sampler)
        if self._grammar is not None:
            self._grammar.take(token)
        return token

    def go_on_after(self, written: Sequence[int]) -> None:
        """Go on as if these tokens had been drawn: penalties and random numbers.

        The random numbers of llama.cpp's `dist` sampler come from a Mersenne twister that cannot be
        read or set. But it takes exactly one number for each token, whatever the choice is
        (`llama_sampler_dist_apply` in llama-sampler.cpp), so its state after n tokens is reached by
        letting it draw n times from a single candidate.
        """
        if self._draws.temperature > 0:
            self._skip_random_numbers(len(written))
        for token in written[-self._draws.last_tokens :]:
            self._chain.accept(token)

    def _skip_random_numbers(self, count: int) -> None:
        last = llama_cpp.llama_sampler_chain_n(self._chain.sampler) - 1
        dist = llama_cpp.llama_sampler_chain_get(self._chain.sampler, last)
        candidate = Candidates(np.zeros(1, np.single))
        for _ in range(count):
            candidate.apply(dist)


def _chain(draws: Draws, n_vocab: int) -> Any:
    """llama.cpp's samplers in llama_cpp's order."""
    chain = internals.LlamaSampler()
    chain.add_penalties(
        n_vocab=n_vocab,
        penalty_last_n=draws.last_tokens,
        penalty_repeat=draws.repeat_penalty,
        penalty_freq=draws.frequency_penalty,
        penalty_present=draws.presence_penalty,
    )
    if draws.temperature == 0:
        chain.add_greedy()
    elif draws.temperature < 0:
        chain.add_dist(draws.seed)
    elif draws.mirostat_mode == 1:
        tau, eta = draws.mirostat_tau, draws.mirostat_eta
        chain.add_mirostat(n_vocab, draws.seed, tau, eta, _MIROSTAT_TOKENS)
    elif draws.mirostat_mode == 2:
        chain.add_mirostat_v2(draws.seed, draws.mirostat_tau, draws.mirostat_eta)
    else:
        chain.add_top_k(draws.top_k)
        chain.add_typical(draws.typical_p, 1)
        chain.add_top_p(draws.top_p, 1)
        chain.add_min_p(draws.min_p, 1)
        chain.add_temp(draws.temperature)
        chain.add_dist(draws.seed)
    return chain
