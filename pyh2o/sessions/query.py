"""Words to search for, and snippets of the texts that have them."""

from __future__ import annotations

# Characters of a snippet before the first match, and in all.
_BEFORE, _SNIPPET = 32, 80
# Minimum length of a word in the trigram index.
_TRIGRAM = 3


class Query:
    """Words that a text must all contain.

    Attributes:
        words: the words, case-folded.
        indexed: FTS5 query of those that the trigram index has; "" for none.
    """

    def __init__(self, words: str) -> None:
        self.words = words.casefold().split()
        quoted = (word.replace('"', '""') for word in self.words if len(word) >= _TRIGRAM)
        self.indexed = " ".join(f'"{word}"' for word in quoted)

    def matches(self, content: str) -> bool:
        """Return whether a text contains the words."""
        folded = content.casefold()
        return all(word in folded for word in self.words)

    def snippet(self, content: str) -> str:
        """Return the first word in its context, in one line."""
        content = " ".join(content.split())
        # case folding may change the length of a text, but hardly the offset
        start = max(0, content.casefold().find(self.words[0]) - _BEFORE)
        if start:  # after a whole word
            start = content.find(" ", start, start + _BEFORE) + 1 or start
        snippet = content[start : start + _SNIPPET]
        after = "..." if start + _SNIPPET < len(content) else ""
        return f"{'...' if start else ''}{snippet}{after}"
