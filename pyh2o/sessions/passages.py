"""Passages of a text: texts of tokens, sentences found by words, and pinned passages."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.detokenizer import PieceDetokenizer, detokenizer
from ..core.model import Model
from ..core.rows import kept_tokens
from ..errors import PyH2OError
from ..writing.cached_text import Span
from .conversation import Conversation

# Replaces tokens that are not part of the text.
HIDDEN = -1
# The space between two sentences, with the characters that end the first one.
_GAP = re.compile(r"(?:[.!?]['\")\]]*|(?=\n))(?P<space>\s+)")


class TokenTexts:
    """The texts of tokens of a text that grows or is truncated.

    A character of several tokens belongs to the last one. Incomplete characters and hidden tokens
    have no text.

    Attributes:
        texts: text of each token.
        ends: number of characters up to the end of each token.
    """

    def __init__(self, *, special: bool) -> None:
        """Start without tokens; `special` shows the text of special tokens."""
        self.texts: list[str] = []
        self.ends: list[int] = []
        self._special = special
        self._tokens: list[int] = []

    def follow(self, model: Model, tokens: Sequence[int], hidden: Sequence[Span] = ()) -> None:
        """Update to these tokens; only new ones are decoded."""
        now = list(tokens)
        for start, end in hidden:
            now[start:end] = [HIDDEN] * (end - start)
        n = len(self._tokens)
        if n == 0 or now[:n] != self._tokens:
            self._begin(model)
            n = 0
        for token in now[n:]:
            text = "" if token == HIDDEN else self._decoder.decode(self._parts.feed(token))
            self.texts.append(text)
            self.ends.append((self.ends[-1] if self.ends else 0) + len(text))
        self._tokens = now

    def _begin(self, model: Model) -> None:
        self.texts, self.ends = [], []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        parts = detokenizer(model, [], starts_text=True)
        if self._special and isinstance(parts, PieceDetokenizer):
            parts = PieceDetokenizer(
                model.native.vocab, model.token_bos(), starts_text=True, special=True
            )
        self._parts = parts

    def span(self, start: int, end: int) -> Span:
        """Return the tokens of a non-empty range of characters."""
        return bisect_right(self.ends, start), bisect_left(self.ends, end) + 1


@dataclass(frozen=True)
class PinnedPassage:
    """A pinned passage.

    Attributes:
        start, end: its tokens, `end` not included.
        held: fraction of its rows that are in the cache or still unread. Without an archive,
            rows that were evicted earlier return only when the text is read again.
    """

    start: int
    end: int
    text: str
    held: float


def pinned_passages(conversation: Conversation) -> list[PinnedPassage]:
    """Return the pinned passages except the system prompt, in text order."""
    pins, llm = conversation.pins, conversation.llm
    if not pins:
        return []
    texts, kept = _texts_of(conversation), kept_tokens(llm)
    passages: list[PinnedPassage] = []
    for start, end in pins:
        inside = (kept.positions >= start) & (kept.positions < end)
        unread = max(0, end - max(start, llm.n_tokens))
        held = (kept.rows[inside].sum() / kept.pairs + unread) / (end - start)
        passages.append(PinnedPassage(start, end, "".join(texts.texts[start:end]), float(held)))
    return passages


def pin_sentences(conversation: Conversation, words: str) -> None:
    """Pin the last sentences that contain these words.

    Args:
        conversation: the conversation.
        words: the words; case and kinds of whitespace do not matter.

    Raises:
        SettingsError: the sentences do not fit the budget.
        PyH2OError: no message contains the words, or the model evicts nothing.
    """
    if not conversation.llm.evicting:
        raise PyH2OError("a full cache evicts nothing: there is nothing to pin")
    found = _sentences(conversation, _pattern(words))
    if found is None:
        text = " ".join(words.split())
        raise PyH2OError(f"{text!r} is not in the conversation: give the exact words")
    conversation.pin(*found)


def unpin_passages(conversation: Conversation, words: str | None = None) -> None:
    """Unpin the passages that contain these words, or all.

    Raises:
        PyH2OError: no pinned passage matches.
    """
    wanted = None if words is None else _pattern(words)
    passages = [
        passage
        for passage in pinned_passages(conversation)
        if wanted is None or wanted.search(passage.text)
    ]
    if not passages:
        what = "nothing is pinned" if words is None else "no pinned passage contains these words"
        raise PyH2OError(what)
    for passage in passages:
        conversation.unpin(passage.start, passage.end)


def _texts_of(conversation: Conversation) -> TokenTexts:
    texts = TokenTexts(special=False)
    texts.follow(conversation.llm.model, conversation.tokens)
    return texts


def _sentences(conversation: Conversation, wanted: re.Pattern[str]) -> Span | None:
    """Return the last sentences of an answer or message that contain the words."""
    texts = _texts_of(conversation)
    whole = "".join(texts.texts)
    for turn in reversed(conversation.turns):
        for first, last, content in (
            (turn.answer_start, turn.end, turn.answer.strip()),
            (turn.start, turn.answer_start, turn.user.strip()),
        ):
            begin, end = (texts.ends[token - 1] if token else 0 for token in (first, last))
            # without the template's text around it
            place = whole.rfind(content, begin, end)
            if place >= 0:
                begin, end = place, place + len(content)
            *_, found = [None, *wanted.finditer(whole, begin, end)]
            if found is not None:
                gaps = [each.span("space") for each in _GAP.finditer(whole, begin, end)]
                starts = [begin, *(gap_end for _, gap_end in gaps if gap_end <= found.start())]
                ends = [*(gap for gap, _ in gaps if gap >= found.end()), end]
                return texts.span(starts[-1], ends[0])
    return None


def _pattern(words: str) -> re.Pattern[str]:
    """Return a pattern for the words with any whitespace between them.

    Raises:
        PyH2OError: there are no words.
    """
    parts = [re.escape(word) for word in words.split()]
    if not parts:
        raise PyH2OError("no words to search for: give some words of the passage")
    return re.compile(r"\s+".join(parts), re.IGNORECASE)
