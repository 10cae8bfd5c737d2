"""Notes within a story: where lore and author's note are inserted, and which tokens they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..core.detokenizer import PieceDetokenizer, detokenizer
from ..core.model import Model
from ..core.tokens import n_common
from ..core.vocabulary import suffix_tokens
from ..writing.cached_text import CachedText, Span
from ..writing.prompt import check_room, prompt_tokens
from .layout import without

# Maximum number of tokens after a note, which are read again. A note at the very end would be
# continued by the model.
NEAR = 128
_SENTENCE_END = re.compile(r"[.!?\u2026][\"'\u201d\u2019)\]]*$")


def own_tokens(tokens: Sequence[int], notes: Sequence[Span]) -> list[int]:
    """Return the tokens of a text without its notes."""
    ends = [0, *(end for _, end in notes)]
    starts = [*(start for start, _ in notes), len(tokens)]
    return [token for end, start in zip(ends, starts, strict=True) for token in tokens[end:start]]


def n_of_notes(n_tokens: int, notes: Sequence[Span]) -> int:
    """Return the number of tokens of notes in the first `n_tokens` tokens."""
    return sum(end - start for start, end in notes if end <= n_tokens)


def n_with_notes(n_own: int, notes: Sequence[Span]) -> int:
    """Return the number of tokens, with notes, up to the end of the first `n_own` own tokens."""
    for start, end in notes:
        if start < n_own:
            n_own += end - start
    return n_own


def hidden_spans(
    model: Model,
    tokens: Sequence[int],
    notes: Sequence[Span],
    *,
    n_prompt: int,
    has_opening: bool,
    memory: str,
) -> list[Span]:
    """Return the spans of tokens that are not part of a story's text."""
    n_first = 0 if has_opening else n_prompt
    if has_opening and memory:
        n_first = n_common(tokens, prompt_tokens(model, f"{memory}\n"))
    return [*([(0, n_first)] if n_first else []), *notes]


def insert_note(text: CachedText, notes: Sequence[Span], note: str, first: int) -> tuple[Span, ...]:
    """Insert a note near the end of a text, drop earlier ones, and return the spans of all notes.

    Args:
        text: the tokens of the story.
        notes: spans of the earlier notes.
        note: the note; "" for none.
        first: minimum number of tokens before it.

    Raises:
        ContextLimitError: no positions are left for it.
    """
    llm, notes = text.llm, tuple(notes)
    if notes and notes[-1][1] == len(text.tokens):  # nothing was generated after it
        text.truncate(notes[-1][0])
        notes = notes[:-1]
    if notes and llm.evicting:
        dropped: Sequence[Span] = notes
        for pin in ((0, text.n_pinned), *text.pins):
            dropped = without(dropped, *pin)
        text.forget(dropped)
    if not note:
        return notes
    first = max(first, text.n_pinned, *(end + 1 for _, end in ((0, 0), *notes, *text.pins)))
    place = place_of_note(llm.model, text.tokens, first)
    if place < llm.n_tokens and not text.has_rows(place):
        place = len(text.tokens)
    tokens = suffix_tokens(llm.model, f"\n{note}\n")
    check_room(llm, len(text.tokens) + len(tokens) - 1)
    if after := text.tokens[place:]:
        text.truncate(place)
    text.tokens += [*tokens, *after]
    return (*notes, (place, place + len(tokens)))


def bracket_tokens(model: Model) -> list[int]:
    """Return the tokens of a model that contain an opening bracket, which notes start with."""
    parts = PieceDetokenizer(model.native.vocab, model.token_bos(), starts_text=False)
    return [token for token in range(model.n_vocab) if b"[" in parts.piece(token)]


def place_of_note(model: Model, tokens: Sequence[int], first: int) -> int:
    """Return the number of tokens before a note: to the end of a paragraph, a sentence, or all.

    Args:
        model: the model.
        tokens: tokens of the text.
        first: minimum of the result.
    """
    first = max(first, len(tokens) - NEAR)
    parts = detokenizer(model, tokens[:first], starts_text=False)
    pieces = [parts.feed(token) for token in tokens[first:]]
    sentence = len(pieces)
    for n in range(1, len(pieces) + 1):
        before, after = (
            b"".join(part).decode(errors="ignore") for part in (pieces[:n], pieces[n : n + 1])
        )
        if before.endswith("\n") and not after.startswith("\n"):
            return first + n
        is_between = not after or after[0].isspace()
        if sentence == len(pieces) and is_between and _SENTENCE_END.search(before):
            sentence = n
    return first + sentence
