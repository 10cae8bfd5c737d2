"""Draws tokens from logits with llama.cpp's samplers, and never from what is no number."""

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

# (token ids so far [n_tokens], logits [n_vocab]) to logits, as in llama_cpp.
LogitsProcessor = Callable[[npt.NDArray[np.intc], LogitsArray], LogitsArray]

# Tokens over which mirostat estimates, as in llama_cpp.
_MIROSTAT_TOKENS = 100


@dataclass(frozen=True)
class SamplerSettings(Sampling):
    """Settings of llama.cpp's samplers, as llama_cpp has them: no number is refused.

    Attributes:
        temperature: 0 always takes the likeliest token; below 0 settings from all of them.
        mirostat_mode: 1 or 2, in the place of top_k, typical_p, top_p and min_p; 0 for none.
        repeat_last_n: number of generated tokens that are penalised, the window at most; -1 is the
            window.
    """

    repeat_penalty: float = 1.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repeat_last_n: int = 64

    def __post_init__(self) -> None:
        """Refuse only what should be a whole number and is not, with a SettingsError."""
        convert_integers(self)


class Sampler:
    """A chain of llama.cpp's samplers, with a logits processor and a grammar before it.

    It calls the processor itself. llama_cpp has C call them, where nothing can be raised: an error
    or Ctrl-C would be lost, and a token drawn from logits as they are.
    """

    def __init__(
        self,
        model: Model,
        settings: Sampling,
        *,
        processor: LogitsProcessor | None = None,
        grammar: Grammar | LlamaGrammar | ChatGuide | None = None,
    ) -> None:
        """Nothing has been drawn yet.

        Raises:
            GrammarError: the grammar is wrong, or too large.
        """
        self._settings = (
            settings if isinstance(settings, SamplerSettings) else SamplerSettings(**vars(settings))
        )
        # a text without an end is searched as far as the window reaches
        self._n_penalised, self._n_dry = (
            model.window if n < 0 else min(n, model.window)
            for n in (self._settings.repeat_last_n, self._settings.dry_penalty_last_n)
        )
        self._chain = _chain(self._settings, model, self._n_penalised, self._n_dry)
        chain = self._chain.sampler
        numbers = range(llama_cpp.llama_sampler_chain_n(chain))
        samplers = [llama_cpp.llama_sampler_chain_get(chain, number) for number in numbers]
        # by their names, which begin with "?" if they are off
        self._samplers = {llama_cpp.llama_sampler_name(each): each for each in samplers}
        self._n_searched = 0  # tokens of the text that DRY knows
        self._processor = processor
        self._grammar: GrammarMatcher | ChatGuide | None = None
        if isinstance(grammar, ChatGuide):
            self._grammar = grammar
        elif grammar is not None:
            self._grammar = GrammarMatcher(model, grammar_of(grammar))

    def sample(self, logits: LogitsArray, tokens: npt.NDArray[np.intc]) -> int:
        """Draw a token.

        Args:
            logits: of all tokens; [n_vocab].
            tokens: of the text so far, for the processor and DRY; [n_tokens].

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
        if b"dry" in self._samplers:
            self._search(tokens)
        for name, sampler in self._samplers.items():
            if name == b"xtc" and candidates.n_left == 1:
                self._skip_random_numbers(name, 1)  # it would take none
            candidates.apply(sampler)
        token = candidates.selected
        self._penalise([token])
        if self._grammar is not None:
            self._grammar.take(token)
        return token

    def _search(self, tokens: npt.NDArray[np.intc]) -> None:
        """Tell DRY what the text has had since the last draw."""
        start = max(self._n_searched, len(tokens) - self._n_dry)
        for token in tokens[start:].tolist():
            llama_cpp.llama_sampler_accept(self._samplers[b"dry"], token)
        self._n_searched = len(tokens)

    def continue_after(self, written: Sequence[int]) -> None:
        """Go on as if these tokens had been drawn: penalties and random numbers.

        The random numbers of llama.cpp's `dist` sampler come from a Mersenne twister that cannot be
        read or set. But it takes exactly one number for each token, whatever the choice is
        (`llama_sampler_dist_apply` in llama-sampler.cpp), so its state after n tokens is reached by
        letting it draw n times. XTC's, which are its own, are skipped where it takes none.
        """
        for name in (b"xtc", b"dist"):
            self._skip_random_numbers(name, len(written))
        self._penalise(written[-self._n_penalised :])

    def _skip_random_numbers(self, name: bytes, count: int) -> None:
        candidates = Candidates(np.zeros(2, np.single))
        for _ in range(count if name in self._samplers else 0):
            candidates.apply(self._samplers[name])
            if candidates.n_left == 1:  # XTC has dropped one
                candidates = Candidates(np.zeros(2, np.single))

    def _penalise(self, tokens: Sequence[int]) -> None:
        for token in tokens if b"penalties" in self._samplers else ():
            llama_cpp.llama_sampler_accept(self._samplers[b"penalties"], token)


def _chain(settings: SamplerSettings, model: Model, n_penalised: int, n_dry: int) -> Any:
    """llama.cpp's samplers in llama_cpp's order, which is llama.cpp's."""
    chain, n_vocab = internals.LlamaSampler(), model.n_vocab
    chain.add_penalties(
        n_vocab=n_vocab,
        penalty_last_n=n_penalised,
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
