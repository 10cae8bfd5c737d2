"""The one loop that draws tokens: for completions, chats, stories, batches and the server."""

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
    """Draws tokens after a text, evaluating only what is new.

    Attributes:
        logits: that the newest token was drawn from; [n_vocab].
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
        """Start drawing, or go on after what an earlier writer of the same sampling has drawn.

        Args:
            text: after which tokens are drawn; nothing is evaluated yet.
            sampling: how they are drawn.
            written: all tokens that the earlier writer has drawn: penalties and random numbers go
                on exactly after them.
            logits_processor: called before each draw.
            grammar: that the tokens have to follow.
            drafts: guesses how the tokens [n_tokens] go on. What it guesses [n_guessed] is read
                with the token before, and taken if it is drawn; the text has to keep all logits.

        Raises:
            GrammarError: the grammar is wrong, or too large.
        """
        self._text = text_of(text)
        self._drafts = drafts
        model = self._text.model
        self._sampler = Sampler(model, sampling, processor=logits_processor, grammar=grammar)
        self._sampler.continue_after(written)

    def write(self, tokens: Sequence[int]) -> Generator[int, Sequence[int] | None, None]:
        """Evaluate `tokens`, then draw one token after the other, until no position is left.

        A drawn token is evaluated when the next one is asked for. So when this is closed early, the
        last token is still to be evaluated: begin the next call with it. What is sent in goes
        behind the drawn token as a draft does: it is evaluated with it, and is taken back from
        where something else is drawn.

        Args:
            tokens: none if the logits behind the text are there.

        Raises:
            ContextLimitError: there are no positions for `tokens`.
            StateError: there are no logits to draw from.
            BusyError: another thread uses the text.
        """
        text = self._text
        with text.lock:  # until a token is drawn, the logits must stay those of this text
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
                    "rows were evicted for tokens that were only guessed: call reset() and "
                    "evaluate the text again"
                )

    def _guessed(self, certain: list[int]) -> list[int]:
        """The next tokens of the text, with those that a draft adds."""
        if self._drafts is None:
            return certain
        # wrong ones are taken back: a compaction amid them could evict rows that are still needed
        room = max(0, self._text.room_in_batch() - len(certain))
        before = np.concatenate([self._text.tokens, np.array(certain, np.intc)])
        guessed: list[int] = self._drafts(before)[:room].tolist()
        return certain + guessed

    def sample(self, at: int) -> int:
        """Draw from the logits of the last evaluation at an index below 0."""
        text = self._text
        with text.lock:
            last_logits(text)
            if -at > len(text.logits):
                raise SettingsError(
                    f"of the last {-at} tokens only {len(text.logits)} have logits to draw from: "
                    "give logits_all=True, and send fewer tokens to a generator at once"
                )
            self.logits = logits = text.logits[at]
            n_tokens = text.n_tokens + 1 + at
            with text.lock.without_context():  # they are a copy: others can be drawn meanwhile
                token = self._sampler.sample(logits, text.record[:n_tokens])
            text.n_sampled += 1
            return token
