"""Passages of a conversation: sentences that are found by words, and what of it is pinned."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..cache.rows import kept_tokens
from ..errors import PyH2OError
from ..writing.cached_text import Span
from .conversation import Conversation
from .token_texts import TokenTexts

# Where a sentence ends, and where the next one begins.
_END = re.compile(r"[.!?]['\")\]]*(?=\s)|(?=\n)|\Z")
_BEGINNING = re.compile(r"(?:\A|[.!?]['\")\]]*\s|\n)\s*")


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
            found = _last_sentences(whole[begin:end], wanted)
            if found is not None:
                return texts.span(begin + found[0], begin + found[1])
    return None


def _last_sentences(said: str, wanted: re.Pattern[str]) -> Span | None:
    """The first and the last character of the last whole sentences with the words."""
    places = list(wanted.finditer(said))
    if not places:
        return None
    found = places[-1]
    starts = [match.end() for match in _BEGINNING.finditer(said)]
    start = max(place for place in starts if place <= found.start())
    end = _END.search(said, found.end() - 1)
    assert end is not None  # a text has an end
    return start, max(end.end(), found.end())


def _pattern(words: str) -> re.Pattern[str]:
    """Finds the words, whatever space is between them.

    Raises:
        PyH2OError: there are none.
    """
    parts = [re.escape(word) for word in words.split()]
    if not parts:
        raise PyH2OError("there are no words to look for: give some of the passage")
    return re.compile(r"\s+".join(parts), re.IGNORECASE)
