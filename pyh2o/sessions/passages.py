"""Passages of a text: which tokens they are, sentences found by words, and what is pinned."""

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

# In the place of a token that is no part of a text.
HIDDEN = -1
# What is between two sentences, with the signs that end the first one.
_GAP = re.compile(r"(?:[.!?]['\")\]]*|(?=\n))(?P<space>\s+)")


class TokenTexts:
    """Texts of the tokens of a text that grows, or is set back.

    A character of several tokens is the last one's. What is no character has no text, and what is
    hidden has none here.

    Attributes:
        texts: of each token.
        ends: characters up to the end of each token.
    """

    def __init__(self, *, special: bool) -> None:
        """`special` gives the marks of a chat template their text."""
        self.texts: list[str] = []
        self.ends: list[int] = []
        self._special = special
        self._tokens: list[int] = []

    def follow(self, model: Model, tokens: Sequence[int], hidden: Sequence[Span] = ()) -> None:
        """Be those of these tokens; only what is new is looked at."""
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
        """The tokens of these characters, of which there is one at least."""
        return bisect_right(self.ends, start), bisect_left(self.ends, end) + 1


@dataclass(frozen=True)
class PinnedPassage:
    """A passage that is never evicted.

    Attributes:
        start, end: its tokens in the text, the last one not included.
        text: what it says.
        held: share, 0 to 1, of its rows that the cache holds or has still to read. Where there is
            no archive, what was evicted before comes back when the text is read again.
    """

    start: int
    end: int
    text: str
    held: float


def pinned_passages(conversation: Conversation) -> list[PinnedPassage]:
    """What is pinned beside the system prompt, in the order of the text."""
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
    """Never evict the newest sentences in which these words stand, from now on.

    Args:
        conversation: in which somebody has said them.
        words: upper and lower case are the same, and so are a space and a line break.

    Raises:
        SettingsError: there is no room for them in the budget.
        PyH2OError: nobody has said that, nothing is ever evicted, or the model has another text by
            now.
    """
    if not conversation.llm.evicting:
        raise PyH2OError("nothing leaves a full cache: there is nothing to pin")
    found = _sentences(conversation, _pattern(words))
    if found is None:
        said = " ".join(words.split())
        raise PyH2OError(f"nobody has said {said!r}: give words as they were said")
    conversation.pin(*found)


def unpin_passages(conversation: Conversation, words: str | None = None) -> None:
    """Let pinned passages be evicted again: those that have these words, or all.

    Raises:
        PyH2OError: there are none, or the model has another text by now.
    """
    wanted = None if words is None else _pattern(words)
    passages = [
        passage
        for passage in pinned_passages(conversation)
        if wanted is None or wanted.search(passage.text)
    ]
    if not passages:
        raise PyH2OError("nothing is pinned" + ("" if words is None else " that has these words"))
    for passage in passages:
        conversation.unpin(passage.start, passage.end)


def _texts_of(conversation: Conversation) -> TokenTexts:
    texts = TokenTexts(special=False)
    texts.follow(conversation.llm.model, conversation.tokens)
    return texts


def _sentences(conversation: Conversation, wanted: re.Pattern[str]) -> Span | None:
    """The newest sentences of an answer or a message in which the words stand."""
    texts = _texts_of(conversation)
    whole = "".join(texts.texts)
    for turn in reversed(conversation.turns):
        for first, last, said in (
            (turn.answer_start, turn.end, turn.answer.strip()),
            (turn.start, turn.answer_start, turn.user.strip()),
        ):
            begin, end = (texts.ends[token - 1] if token else 0 for token in (first, last))
            # without what a template writes around it
            place = whole.rfind(said, begin, end)
            if place >= 0:
                begin, end = place, place + len(said)
            *_, found = [None, *wanted.finditer(whole, begin, end)]
            if found is not None:
                gaps = [each.span("space") for each in _GAP.finditer(whole, begin, end)]
                starts = [begin, *(gap_end for _, gap_end in gaps if gap_end <= found.start())]
                ends = [*(gap for gap, _ in gaps if gap >= found.end()), end]
                return texts.span(starts[-1], ends[0])
    return None


def _pattern(words: str) -> re.Pattern[str]:
    """Finds the words, whatever space is between them.

    Raises:
        PyH2OError: there are none.
    """
    parts = [re.escape(word) for word in words.split()]
    if not parts:
        raise PyH2OError("there are no words to look for: give some of the passage")
    return re.compile(r"\s+".join(parts), re.IGNORECASE)
