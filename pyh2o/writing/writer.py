"""The loop that samples tokens: for completions, chats, stories, batches and the server."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
from llama_cpp import LlamaGrammar

from ..cache.kv_cache import IntArray
from ..core.text import HasText, Text, last_logits, text_of
from ..errors import EvictedError, SettingsError
from .chat_guide import ChatGuide
from .grammar import Grammar
from .sampler import LogitsProcessor, Sampler
from .sampling import Sampling


class Writer:
    """Samples tokens after a text, and evaluates only new tokens.

    Attributes:
        logits: logits of the last sampled token; [n_vocab].
    """

    def __init__(
        self,
        text: Text | HasText,
        sampling: Sampling,
        *,
        written: Sequence[int] = (),
        logits_processor: LogitsProcessor | None = None,
        grammar: Grammar | LlamaGrammar | ChatGuide | None = None,
        drafts: Callable[[IntArray], IntArray] | None = None,
    ) -> None:
        """Start, or continue an earlier writer with the same sampling settings.

        Args:
            text: the text to continue; nothing is evaluated yet.
            sampling: sampling settings.
            written: all tokens that the earlier writer has sampled, so that penalties and random
                numbers continue after them.
            logits_processor: called before each sample.
            grammar: grammar of the tokens.
            drafts: guesses the next tokens [n_guessed] of the tokens [n_tokens]. They are evaluated
                with the token before, and accepted if they are sampled. The text must keep all
                logits.

        Raises:
            GrammarError: the grammar is invalid or too large.
        """
        self._text = text_of(text)
        self._drafts = drafts
        model = self._text.model
        self._sampler = Sampler(model, sampling, processor=logits_processor, grammar=grammar)
        self._sampler.continue_after(written)

    def write(self, tokens: Sequence[int]) -> Generator[int, Sequence[int] | None, None]:
        """Evaluate `tokens`, then sample tokens until no position is left.

        A sampled token is evaluated when the next one is requested. If the generator is closed
        early, the next call must start with the last token. Tokens that are sent to the generator
        are a draft: they are evaluated with the sampled token, and removed from where another token
        is sampled.

        Args:
            tokens: tokens to evaluate; none if the text has logits.

        Raises:
            ContextLimitError: there are no positions for `tokens`.
            StateError: there are no logits to sample from.
            BusyError: another thread uses the text.
        """
        text = self._text
        with text.lock:  # the logits must not change before a token is sampled
            text.read(tokens)
            token = self.sample(-1)
        while True:
            sent = yield token
            guessed = self._guessed([token, *(sent or ())])
            start, n = text.n_tokens, len(guessed)
            if start + 1 + len(sent or ()) > text.position_limit:
                return
            with text.lock:
                text.eval(guessed)
                token = self.sample(-n)
            n_right = 1
            while n_right < n and token == guessed[n_right]:
                yield token
                n_right += 1
                token = self.sample(n_right - 1 - n)
            if n_right < n and not text.remove_tail(start + n_right):
                raise EvictedError(
                    "rows were evicted for draft tokens that were rejected: call reset() and "
                    "evaluate the text again"
                )

    def _guessed(self, certain: list[int]) -> list[int]:
        """Return the next tokens with those of a draft."""
        if self._drafts is None:
            return certain
        # rejected ones are removed: a compaction between them could evict rows still needed
        room = max(0, self._text.room_in_batch() - len(certain))
        before = np.concatenate([self._text.tokens, np.array(certain, np.intc)])
        guessed: list[int] = self._drafts(before)[:room].tolist()
        return certain + guessed

    def sample(self, at: int) -> int:
        """Sample from the logits of the last evaluation at a negative index."""
        text = self._text
        with text.lock:
            last_logits(text)
            if -at > len(text.logits):
                raise SettingsError(
                    f"only {len(text.logits)} of the last {-at} tokens have logits: give "
                    "logits_all=True, and send fewer tokens to a generator at once"
                )
            self.logits = logits = text.logits[at]
            n_tokens = text.n_tokens + 1 + at
            with text.lock.without_context():  # they are a copy
                token = self._sampler.sample(logits, text.record[:n_tokens])
            text.n_sampled += 1
            return token
