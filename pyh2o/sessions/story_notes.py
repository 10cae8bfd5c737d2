"""What a model is told within a story: where it stands, and which tokens are the text's own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..core.detokenizer import PieceDetokenizer, detokenizer
from ..core.model import Model
from ..core.prefixes import n_common
from ..core.vocabulary import suffix_tokens
from ..writing.cached_text import CachedText, Span
from ..writing.prompt import check_room, prompt_tokens
from .layout import without

# A note goes before so many of the newest tokens at most, which are read again: what stands at the
# very end is what models go on with.
NEAR = 128
_SENTENCE_END = re.compile(r"[.!?\u2026][\"'\u201d\u2019)\]]*$")


def own_tokens(tokens: Sequence[int], told: Sequence[Span]) -> list[int]:
    """The tokens of a text without those of what the model was told."""
    ends = [0, *(end for _, end in told)]
    starts = [*(start for start, _ in told), len(tokens)]
    return [token for end, start in zip(ends, starts, strict=True) for token in tokens[end:start]]


def n_with_told(n_own: int, told: Sequence[Span]) -> int:
    """The number of tokens up to the end of so many of the text's own, told ones among them."""
    for start, end in told:
        if start < n_own:
            n_own += end - start
    return n_own


def hidden_spans(
    model: Model,
    tokens: Sequence[int],
    told: Sequence[Span],
    *,
    n_prompt: int,
    opening: str,
    memory: str,
) -> list[Span]:
    """Where the tokens of a story are no part of its text."""
    n_first = 0 if opening else n_prompt
    if opening and memory:
        n_first = n_common(tokens, prompt_tokens(model, f"{memory}\n"))
    return [*([(0, n_first)] if n_first else []), *told]


def tell(text: CachedText, told: Sequence[Span], note: str, first: int) -> tuple[Span, ...]:
    """Put a note into a text, near its end, in the place of those before; where all of them are.

    Args:
        text: of a story.
        told: where notes are.
        note: "" for none.
        first: least number of tokens before it.

    Raises:
        ContextLimitError: there are no positions for it.
    """
    llm, told = text.llm, tuple(told)
    if told and told[-1][1] == len(text.tokens):  # and nothing came of it
        text.truncate(told[-1][0])
        told = told[:-1]
    if told and llm.evicting:
        gone: Sequence[Span] = told
        for pin in ((0, text.n_pinned), *text.pins):
            gone = without(gone, *pin)
        text.forget(gone)
    if not note:
        return told
    first = max(first, text.n_pinned, *(end + 1 for _, end in ((0, 0), *told, *text.pins)))
    place = place_of_note(llm.model, text.tokens, first)
    if place < llm.n_tokens and not text.has_rows(place):
        place = len(text.tokens)
    tokens = suffix_tokens(llm.model, f"\n{note}\n")
    check_room(llm, len(text.tokens) + len(tokens) - 1)
    if behind := text.tokens[place:]:
        text.truncate(place)
    text.tokens += [*tokens, *behind]
    return (*told, (place, place + len(tokens)))


def bracket_tokens(model: Model) -> list[int]:
    """The tokens of a model that have an opening bracket in them: what notes begin with."""
    parts = PieceDetokenizer(model.native.vocab, model.token_bos(), starts_text=False)
    return [token for token in range(model.n_vocab) if b"[" in parts.piece(token)]


def place_of_note(model: Model, tokens: Sequence[int], first: int) -> int:
    """How many tokens stay before a note: up to the end of a paragraph, of a sentence, or all.

    Args:
        model: it.
        tokens: of the text.
        first: the least number of them.
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
