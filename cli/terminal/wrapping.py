"""Lines of prose that end between words, although they are shown as they come."""

from __future__ import annotations

from rich.cells import cell_len

TAB = 8
FENCES = ("```", "~~~")
# Signs of a line by which a fence is known, behind blanks.
SHOWN = 12


class Wrapping:
    """Where text that a terminal is shown piece by piece has to begin a new line.

    A word that does not fit any more is taken back and begins the next line. Code between fences
    stays as it is, and what is longer than a line is broken by the terminal.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # that the line ends with, as far as it came
        self._line = ""  # how the line begins
        self._is_code = False

    def feed(self, text: str, width: int) -> str:
        """What to write for this text on a terminal of so many columns."""
        return "".join(self._sign(sign, width) for sign in text)

    def _sign(self, sign: str, width: int) -> str:
        if sign == "\n":
            self._is_code ^= self._line.lstrip().startswith(FENCES)
            self._column, self._word, self._line = 0, "", ""
            return sign
        if len(self._line) < SHOWN:
            self._line += sign
        if self._is_code:
            return sign
        if sign.isspace():
            return self._space(sign, width)
        # the last column stays free: behind it terminals do not know where they are
        before, cells = "", cell_len(sign)
        if self._column + cells >= width and cell_len(self._word) < self._column:
            before = self._next_line()
        elif self._column + cells > width:
            self._column, self._word = 0, ""  # the terminal does it, amid a word
        self._column += cells
        self._word = self._word + sign if cells < 2 else ""  # wide ones are words of their own
        return before + sign

    def _space(self, sign: str, width: int) -> str:
        self._word = ""
        cells = TAB - self._column % TAB if sign == "\t" else 1
        if self._column + cells >= width:
            self._column = 0
            return "\n"
        self._column += cells
        return sign

    def _next_line(self) -> str:
        """Take the word to the next line."""
        self._column = cell_len(self._word)
        back = f"\x1b[{self._column}D\x1b[K" if self._column else ""
        return f"{back}\n{self._word}"
