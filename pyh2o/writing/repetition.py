"""Notices that a text has fallen into a loop, and forbids the tokens that would go on with it.

Small models that always take the likeliest token end in loops: the same block of tokens again and
again, for ever. In a loop of period p every token equals the one p tokens before it. For how many
tokens that has been so is counted for all periods at once, so the work for a token does not depend
on the length of the text.

To forbid one token would not help: the model writes another one and returns to its loop. So for
some time after a loop the text may not copy any longer piece of what it has just said.

An answer of a chat may have been asked to repeat something, so nothing is forbidden there: it ends
where it has done nothing else for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Longest block of tokens whose repetition is seen: some paragraphs.
MAX_PERIOD = 512
# It is a loop when at least this many tokens equal those one period before them, and at least two
# whole periods of them do: five times the same clause, or three times the same paragraph.
MIN_MATCHES = 48
MIN_COPIES = 2
# For so many tokens after that, no more than so many may be copied from the last MAX_PERIOD. With 8
# the demo model could not repeat long names and began to misspell them.
STRICT_TOKENS = 512
MAX_COPIED = 16
# A model that comes back with so many loops in so many tokens has nothing more to say.
MANY_LOOPS = 6
MANY_LOOPS_TOKENS = 6000
# An answer that only repeats itself: so many tokens and whole periods that equal those before them.
# Long enough for the tables and lists of a usual answer, and hardly a minute of a slow model.
ENDLESS_MATCHES = 256
ENDLESS_COPIES = 4


class _Periods:
    """For how many tokens a text has equaled itself one period before.

    Attributes:
        matches: number of tokens for the periods from MAX_PERIOD down to 1, [MAX_PERIOD].
        recent: the last tokens, [MAX_PERIOD]: what came next, one of each period ago.
    """

    def __init__(self) -> None:
        self.matches = np.zeros(MAX_PERIOD, dtype=np.int64)
        self.recent = np.full(MAX_PERIOD, -1, dtype=np.int64)  # no token is -1

    def count(self, token: int) -> None:
        """Add the next token."""
        self.matches = (self.matches + 1) * (self.recent == token)
        self.recent = np.append(self.recent[1:], token)


class RepetitionGuard:
    """Which tokens a text may not go on with; a function of its tokens alone.

    Attributes:
        loops: number of loops noticed so far.
        forbidden: tokens that may not come next.
        hopeless: whether the text has come back to loops again and again, lately.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        """Start after a prompt: its tokens may not be copied for ever either."""
        self._needed = _needed(MIN_MATCHES, MIN_COPIES)
        self._periods = _Periods()
        self._n_tokens = 0
        self._strict_until = 0
        self._latest: deque[int] = deque(maxlen=MANY_LOOPS)
        self.loops = 0
        # More cannot matter: it is the most that is needed for a loop, and one period before it.
        for token in prompt[-(MIN_COPIES + 1) * MAX_PERIOD :]:
            self._periods.count(token)

    def add(self, token: int) -> None:
        """Add the next token that was written."""
        self._periods.count(token)
        self._n_tokens += 1
        is_free = self._n_tokens >= self._strict_until
        if is_free and (self._periods.matches >= self._needed).any():
            self.loops += 1
            self._latest.append(self._n_tokens)
            self._strict_until = self._n_tokens + STRICT_TOKENS

    @property
    def forbidden(self) -> list[int]:
        if self._n_tokens >= self._strict_until:
            return []
        copied = self._periods.matches >= MAX_COPIED
        return np.unique(self._periods.recent[copied]).tolist() if copied.any() else []

    @property
    def hopeless(self) -> bool:
        is_full = len(self._latest) == MANY_LOOPS
        return is_full and self._n_tokens - self._latest[0] <= MANY_LOOPS_TOKENS


class EndlessText:
    """Notices a text that does nothing but repeat itself; a function of its tokens alone."""

    def __init__(self, before: Sequence[int] = ()) -> None:
        """Start behind tokens of the text that were written before."""
        self._needed = _needed(ENDLESS_MATCHES, ENDLESS_COPIES)
        self._periods = _Periods()
        for token in before:
            self._periods.count(token)

    def add(self, token: int) -> bool:
        """Add the next token; whether the text should end with it.

        A text that is to go on all the same may repeat ENDLESS_MATCHES tokens more.
        """
        self._periods.count(token)
        matches = self._periods.matches
        endless = matches[matches >= self._needed]
        # The shortest period has the most, and the others are its multiples.
        return bool(len(endless)) and int(endless.max()) % ENDLESS_MATCHES == 0


def _needed(matches: int, copies: int) -> npt.NDArray[np.int64]:
    """For each period the tokens that have to equal those before them, [MAX_PERIOD]."""
    return np.maximum(matches, copies * np.arange(MAX_PERIOD, 0, -1))
