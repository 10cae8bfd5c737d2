"""Samples tokens with llama.cpp's samplers; logits that are not finite are errors."""

from __future__ import annotations

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
from ..system.integers import convert_integers
from .candidates import Candidates
from .chat_guide import ChatGuide
from .grammar import Grammar, GrammarMatcher, grammar_of
from .sampling import Sampling

# (token ids so far [n_tokens], logits [n_vocab]) -> logits, as in llama_cpp.
LogitsProcessor = Callable[[npt.NDArray[np.intc], LogitsArray], LogitsArray]

# Number of tokens for mirostat's estimate, as in llama_cpp.
_MIROSTAT_TOKENS = 100


@dataclass(frozen=True)
class SamplerSettings(Sampling):
    """Settings of llama.cpp's samplers, with llama_cpp's options and any numbers.

    Attributes:
        temperature: 0 takes the most probable token; a negative value samples from all tokens.
        mirostat_mode: 1 or 2 replaces top_k, typical_p, top_p and min_p; 0 is off.
        repeat_last_n: number of generated tokens that are penalized; -1 for the window, which is
            also the maximum.
    """

    repeat_penalty: float = 1.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repeat_last_n: int = 64

    def __post_init__(self) -> None:
        """Raise a SettingsError for integers that are not; the ranges are not checked."""
        convert_integers(self)


class Sampler:
    """A chain of llama.cpp's samplers after a logits processor and a grammar.

    Python calls the processor. In llama_cpp, C calls it, where errors and Ctrl-C are lost and a
    token is sampled from the unprocessed logits.
    """

    def __init__(
        self,
        model: Model,
        settings: Sampling,
        *,
        processor: LogitsProcessor | None = None,
        grammar: Grammar | LlamaGrammar | ChatGuide | None = None,
    ) -> None:
        self._settings = (
            settings if isinstance(settings, SamplerSettings) else SamplerSettings(**vars(settings))
        )
        # -1 means the whole text, which has no limit, so it is cut to the window
        self._n_penalized, self._n_dry = (
            model.window if n < 0 else min(n, model.window)
            for n in (self._settings.repeat_last_n, self._settings.dry_penalty_last_n)
        )
        self._chain = _chain(self._settings, model, self._n_penalized, self._n_dry)
        chain = self._chain.sampler
        numbers = range(llama_cpp.llama_sampler_chain_n(chain))
        samplers = [llama_cpp.llama_sampler_chain_get(chain, number) for number in numbers]
        # by name, which starts with "?" if the sampler is off
        self._samplers = {llama_cpp.llama_sampler_name(each): each for each in samplers}
        self._n_dry_tokens = 0  # number of tokens passed to DRY
        self._processor = processor
        self._grammar: GrammarMatcher | ChatGuide | None = None
        if isinstance(grammar, ChatGuide):
            self._grammar = grammar
        elif grammar is not None:
            self._grammar = GrammarMatcher(model, grammar_of(grammar))

    def sample(self, logits: LogitsArray, tokens: npt.NDArray[np.intc]) -> int:
        """Sample a token from [n_vocab] logits after the text so far, for the processor and DRY."""
        check_logits(logits)
        candidates = Candidates(logits)
        if self._processor is not None:
            candidates.logits[:] = self._processor(tokens, candidates.logits)
        if self._grammar is not None:
            self._grammar.mask(candidates)
        if not candidates.logits.max() > -math.inf:
            raise SettingsError(
                "the logits processors or logit_bias leave no token to sample: return a number for "
                "every token, with at least one above minus infinity"
            )
        if b"dry" in self._samplers:
            self._feed_dry(tokens)
        for name, sampler in self._samplers.items():
            if name == b"xtc" and candidates.n_left == 1:
                self._skip_random_numbers(name, 1)  # it would not consume one
            candidates.apply(sampler)
        token = candidates.selected
        self._penalize([token])
        if self._grammar is not None:
            self._grammar.take(token)
        return token

    def _feed_dry(self, tokens: npt.NDArray[np.intc]) -> None:
        """Pass the tokens since the last sample to DRY."""
        start = max(self._n_dry_tokens, len(tokens) - self._n_dry)
        for token in tokens[start:].tolist():
            llama_cpp.llama_sampler_accept(self._samplers[b"dry"], token)
        self._n_dry_tokens = len(tokens)

    def continue_after(self, written: Sequence[int]) -> None:
        """Set penalties and random numbers as if these tokens had been sampled.

        The Mersenne twister of llama.cpp's `dist` sampler cannot be read or set. But it consumes
        exactly one number per token (`llama_sampler_dist_apply` in llama-sampler.cpp), so sampling
        n times reaches its state after n tokens. XTC has its own random numbers; they are skipped
        whenever it would not consume one.
        """
        for name in (b"xtc", b"dist"):
            self._skip_random_numbers(name, len(written))
        self._penalize(written[-self._n_penalized :])

    def _skip_random_numbers(self, name: bytes, count: int) -> None:
        candidates = Candidates(np.zeros(2, np.single))
        for _ in range(count if name in self._samplers else 0):
            candidates.apply(self._samplers[name])
            if candidates.n_left == 1:  # XTC has dropped one
                candidates = Candidates(np.zeros(2, np.single))

    def _penalize(self, tokens: Sequence[int]) -> None:
        for token in tokens if b"penalties" in self._samplers else ():
            llama_cpp.llama_sampler_accept(self._samplers[b"penalties"], token)


def _chain(settings: SamplerSettings, model: Model, n_penalized: int, n_dry: int) -> Any:
    """Return the chain in llama.cpp's order."""
    chain, n_vocab = internals.LlamaSampler(), model.n_vocab
    chain.add_penalties(
        n_vocab=n_vocab,
        penalty_last_n=n_penalized,
        penalty_repeat=settings.repeat_penalty,
        penalty_freq=settings.frequency_penalty,
        penalty_present=settings.presence_penalty,
    )
    chain.add_dry(
        model.native,
        settings.dry_multiplier,
        settings.dry_base,
        settings.dry_allowed_length,
        n_dry,
        list(settings.dry_sequence_breakers),
    )
    if settings.temperature == 0:
        chain.add_greedy()
    elif settings.temperature < 0:
        chain.add_dist(settings.seed)
    elif settings.mirostat_mode == 1:
        tau, eta = settings.mirostat_tau, settings.mirostat_eta
        chain.add_mirostat(n_vocab, settings.seed, tau, eta, _MIROSTAT_TOKENS)
    elif settings.mirostat_mode == 2:
        chain.add_mirostat_v2(settings.seed, settings.mirostat_tau, settings.mirostat_eta)
    else:
        chain.add_top_k(settings.top_k)
        chain.add_typical(settings.typical_p, 1)
        chain.add_top_p(settings.top_p, 1)
        chain.add_min_p(settings.min_p, 1)
        chain.add_xtc(settings.xtc_probability, settings.xtc_threshold, 1, settings.seed)
        chain.add_temp(settings.temperature)
        chain.add_dist(settings.seed)
    return chain
