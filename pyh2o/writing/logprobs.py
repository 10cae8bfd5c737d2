"""Log probabilities of tokens, in the formats of completions and chats.

Tokens are named by their text; the names at one position are unique. A token that is not valid
UTF-8, such as a part of a character, is named by its bytes as in OpenAI's API
(`bytes:\\xf0\\x9f`), and so is a token whose text is taken. If the token has no bytes, or they are
taken too, its name is its number (`token_id:7`).
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp import Llama as StockLlama
from llama_cpp.llama_types import CompletionLogprobs

from ..core.detokenizer import Detokenizer

if TYPE_CHECKING:
    from ..core.model import Model

_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")
_NUMBER = re.compile(r"token_id:\d+")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of a token and its alternatives.

    Attributes:
        name: name of the token; a control token has its text in the vocabulary.
        offset: number of characters before the token.
        logprob: log probability; None for the first token of a text.
        top: log probabilities by name, of the most probable tokens in descending order, then of
            the token itself.
    """

    name: str
    offset: int
    logprob: float | None
    top: dict[str, float] | None


class LogprobRecorder:
    """Records the log probabilities of tokens as they are sampled."""

    def __init__(self, model: Model, parts: Detokenizer, top: int, offset: int) -> None:
        """Prepare to record tokens.

        Args:
            parts: detokenizer of the same tokens, used by nobody else.
            offset: number of characters before the first token.
        """
        self._model = model
        self._parts = parts
        self._bos = model.token_bos()
        self._top = top
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._records: deque[TokenLogprobs | None] = deque()

    def record(self, token: int, logits: npt.NDArray[np.single]) -> None:
        """Record a token; logits: [n_vocab]."""
        if token == self._bos:
            self._records.append(None)  # BOS has no text and is not reported
            self._parts.feed(token)
            return
        logprobs = StockLlama.logits_to_logprobs(logits)
        # of equal logits the higher token first, as in llama_cpp
        order = np.argsort(logprobs, kind="stable")[::-1][: self._top].tolist()
        names: dict[int, str] = {}
        for each in (token, *order):
            names[each] = names.get(each) or self._name(each, names.values())
        top = {names[each]: float(logprobs[each]) for each in (*order, token)}
        record = TokenLogprobs(names[token], self._offset, top[names[token]], top)
        self._records.append(record)
        self._offset += len(self._decoder.decode(self._parts.feed(token)))

    def take(self, n: int | None = None) -> list[TokenLogprobs]:
        """Remove and return the records of the oldest `n` tokens, or of all."""
        n = len(self._records) if n is None else n
        taken = [self._records.popleft() for _ in range(n)]
        return [record for record in taken if record is not None]

    def _name(self, token: int, taken: Collection[str]) -> str:
        data = self._parts.piece(token) or self._model.detokenize([token], special=True)
        names = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in data)] if data else []
        text = data.decode(errors="ignore")
        if text and text.encode() == data:
            names.insert(0, text)
        return next((name for name in names if name not in taken), f"token_id:{token}")


def completion_logprobs(records: Iterable[TokenLogprobs]) -> CompletionLogprobs:
    """Return the records as the columns of a completion."""
    records = list(records)
    return {
        "tokens": [record.name for record in records],
        "text_offset": [record.offset for record in records],
        "token_logprobs": [record.logprob for record in records],
        "top_logprobs": [record.top for record in records],
    }


def chat_logprobs(records: Iterable[TokenLogprobs], most: int) -> dict[str, Any]:
    """Return the records as the list of a chat, with `most` alternatives each."""
    content = [
        {
            **_named(record.name, record.logprob),
            "top_logprobs": [_named(*each) for each in [*(record.top or {}).items()][:most]],
        }
        for record in records
    ]
    return {"content": content, "refusal": None}


def _named(name: str, logprob: float | None) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": _bytes_of(name)}


def _bytes_of(name: str) -> list[int] | None:
    if found := _BYTES.fullmatch(name):
        return list(bytes.fromhex(found[1].replace("\\x", "")))
    return None if _NUMBER.fullmatch(name) else list(name.encode())
