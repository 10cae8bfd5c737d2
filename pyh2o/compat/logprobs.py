"""Log probabilities of tokens, in the form completions report them."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llama_cpp import Llama as StockLlama
from llama_cpp.llama_types import CompletionLogprobs

from ..core.detokenizer import Detokenizer


@dataclass(frozen=True)
class TokenLogprobs:
    """What is reported of one token.

    Attributes:
        text: of the token alone; of a part of a character, nothing.
        offset: characters of text before it.
        logprob: natural logarithm of its probability; None for the first token of a text.
        top: the most probable texts here and the token's own, with their `logprob`.
    """

    text: str
    offset: int
    logprob: float | None
    top: dict[str, float] | None


class LogprobRecorder:
    """Records tokens one after another, from the logits each was drawn from."""

    def __init__(self, parts: Detokenizer, bos: int, top: int, offset: int) -> None:
        """`top` is the number of most probable tokens to report, `offset` where the text begins.

        `parts` gives the texts of the tokens, and of nothing else.
        """
        self._parts = parts
        self._bos = bos
        self._top = top
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._records: deque[TokenLogprobs | None] = deque()

    def record(self, token: int, logits: npt.NDArray[np.single]) -> None:
        """Record a token; logits: [n_vocab]."""
        if token == self._bos:
            self._records.append(None)  # BOS is no text, so nothing is reported of it.
            self._parts.feed(token)
            return
        logprobs = StockLlama.logits_to_logprobs(logits)
        # Of two equal ones the higher token first: the order llama_cpp has.
        order = np.argsort(logprobs, kind="stable")[::-1][: self._top]
        top = {self._text(other): float(logprobs[other]) for other in order.tolist()}
        text = self._text(token)
        logprob = float(logprobs[token])
        self._records.append(TokenLogprobs(text, self._offset, logprob, top | {text: logprob}))
        self._offset += len(self._decoder.decode(self._parts.feed(token)))

    def take(self, n: int | None = None) -> list[TokenLogprobs]:
        """Remove and return the records of the oldest `n` tokens, or of all."""
        n = len(self._records) if n is None else n
        taken = [self._records.popleft() for _ in range(n)]
        return [record for record in taken if record is not None]

    def _text(self, token: int) -> str:
        return self._parts.piece(token).decode(errors="ignore")


def completion_logprobs(records: Iterable[TokenLogprobs]) -> CompletionLogprobs:
    """The records as the columns that a completion has."""
    records = list(records)
    return {
        "tokens": [record.text for record in records],
        "text_offset": [record.offset for record in records],
        "token_logprobs": [record.logprob for record in records],
        "top_logprobs": [record.top for record in records],
    }
