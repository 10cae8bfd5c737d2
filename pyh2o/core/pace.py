"""How many tokens may be read beside texts that are written, without a pause that one notices."""

from __future__ import annotations

# A batch in which a text reads takes at most so many times that of the others' tokens alone.
LONGEST_PAUSE = 1.75
# How much a new time counts against those before.
NEWEST = 0.3
# As long as nothing is known.
FIRST_PIECE = 16


class Pace:
    """Times of batches, and the size of a piece of a prompt that follows from them."""

    def __init__(self, most: int) -> None:
        """`most` tokens are read at once beside others, however fast that is."""
        self._most = most
        self._step_seconds: dict[int, float] = {}  # by texts that are written, when none is read
        self._read_seconds = 0.0  # of one token more in a batch

    def piece(self, n_written: int) -> int:
        """Most tokens to read in a batch beside so many texts that are written."""
        step = self._step(n_written)
        if step is None or self._read_seconds == 0.0:
            return min(FIRST_PIECE, self._most)
        room = (LONGEST_PAUSE - 1) * step / self._read_seconds
        return max(1, min(self._most, int(room)))

    def note(self, n_written: int, n_read: int, seconds: float) -> None:
        """A batch took so long."""
        if n_written == 0:
            return  # nobody waited, and larger pieces are read faster
        if n_read == 0:
            before = self._step_seconds.get(n_written, seconds)
            self._step_seconds[n_written] = before + NEWEST * (seconds - before)
            return
        step = self._step(n_written)
        if step is not None:
            each = max(0.0, seconds - step) / n_read
            before = self._read_seconds or each
            self._read_seconds = before + NEWEST * (each - before)

    def _step(self, n_written: int) -> float | None:
        """Seconds of a batch of so many texts, as far as one like it is known."""
        if not self._step_seconds:
            return None
        nearest = min(self._step_seconds, key=lambda n: abs(n - n_written))
        seconds = self._step_seconds[nearest]
        # more texts take longer, but how much is not known: that of fewer is on the safe side
        return seconds if nearest <= n_written else seconds * n_written / nearest
