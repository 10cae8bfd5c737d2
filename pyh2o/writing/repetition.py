"""Detects loops in a text, and the tokens that would continue a loop.

Small models with greedy sampling end in loops: they repeat the same block of tokens forever. In a
loop of period p every token equals the one p tokens before it. The number of such tokens is counted
for all periods at once, so the work per token does not depend on the length of the text.

Suppressing a single token is not enough: the model samples another one and returns to its loop. So
for some time after a loop, the text may not copy long sequences of its last tokens.

An answer in a chat may have to repeat something. So nothing is suppressed there, but the answer
ends if it only repeats itself for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Longest period that is detected: some paragraphs.
MAX_PERIOD = 512
# A loop has at least this many tokens that equal those one period before them, and at least two
# periods of them: the same clause five times, or the same paragraph three times.
MIN_MATCHES = 48
MIN_COPIES = 2
# For STRICT_TOKENS after a loop, at most MAX_COPIED tokens in a row may be copied from the last
# MAX_PERIOD. With 8, the demo model could not repeat long names and misspelled them.
STRICT_TOKENS = 512
MAX_COPIED = 16
# With this many loops in this many tokens, the text is hopeless.
MANY_LOOPS = 6
MANY_LOOPS_TOKENS = 6000
# An answer is endless if this many tokens and periods equal those before them. That is enough for
# tables and lists, and takes a slow model less than a minute.
ENDLESS_MATCHES = 256
ENDLESS_COPIES = 4


class _Periods:
    """Counts, for each period, the last tokens that equal those one period before them.

    Attributes:
        matches: counts for the periods from MAX_PERIOD down to 1, [MAX_PERIOD].
        recent: the last tokens, [MAX_PERIOD].
    """

    def __init__(self) -> None:
        self.matches = np.zeros(MAX_PERIOD, dtype=np.int64)
        self.recent = np.full(MAX_PERIOD, -1, dtype=np.int64)  # no token is -1

    def count(self, token: int) -> None:
        self.matches = (self.matches + 1) * (self.recent == token)
        self.recent = np.append(self.recent[1:], token)


class RepetitionGuard:
    """Suppresses loops; its state depends on the tokens only.

    Attributes:
        loops: number of loops so far.
        forbidden: tokens that may not come next.
        hopeless: whether the text has returned to loops too often.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        """Start after a prompt, whose tokens count as copied too."""
        self._needed = _needed(MIN_MATCHES, MIN_COPIES)
        self._periods = _Periods()
        self._n_tokens = 0
        self._strict_until = 0
        self._latest: deque[int] = deque(maxlen=MANY_LOOPS)
        self.loops = 0
        # enough tokens for the longest loop and one period before it
        for token in prompt[-(MIN_COPIES + 1) * MAX_PERIOD :]:
            self._periods.count(token)

    def add(self, token: int) -> None:
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
    """Detects a text that only repeats itself; its state depends on the tokens only."""

    def __init__(self, before: Sequence[int] = ()) -> None:
        """Start after earlier tokens of the text."""
        self._needed = _needed(ENDLESS_MATCHES, ENDLESS_COPIES)
        self._periods = _Periods()
        for token in before:
            self._periods.count(token)

    def add(self, token: int) -> bool:
        """Add the next token; return whether the text should end with it.

        If the text continues, the result is True again after ENDLESS_MATCHES more repeated tokens.
        """
        self._periods.count(token)
        matches = self._periods.matches
        endless = matches[matches >= self._needed]
        # the shortest period has the highest count; the others are its multiples
        return bool(len(endless)) and int(endless.max()) % ENDLESS_MATCHES == 0


def _needed(matches: int, copies: int) -> npt.NDArray[np.int64]:
    """Return the minimum number of matching tokens for each period, [MAX_PERIOD]."""
    return np.maximum(matches, copies * np.arange(MAX_PERIOD, 0, -1))
