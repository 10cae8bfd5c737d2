"""Incremental word wrapping."""

from __future__ import annotations

from rich.cells import cell_len

TAB = 8
FENCES = ("```", "~~~")
# Number of first characters of a line to check for a fence.
SHOWN = 12


class Wrapping:
    """Wraps text between words while it is written piece by piece.

    A word that does not fit the line is erased and written on the next one. Code between fences is
    not wrapped, and the terminal breaks words that are longer than a line.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""  # incomplete word at the end of the line
        self._line = ""  # first characters of the line
        self._is_code = False

    def feed(self, text: str, width: int) -> str:
        """Return what to write for this text on a terminal of `width` columns."""
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
        # the last column stays free, as the cursor position after it is ambiguous
        before, cells = "", cell_len(sign)
        if self._column + cells >= width and cell_len(self._word) < self._column:
            before = self._next_line()
        elif self._column + cells > width:
            self._column, self._word = 0, ""  # the terminal breaks the word
        self._column += cells
        self._word = self._word + sign if cells < 2 else ""  # lines may break after wide ones
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
        """Return what erases the word and writes it on the next line."""
        self._column = cell_len(self._word)
        back = f"\x1b[{self._column}D\x1b[K" if self._column else ""
        return f"{back}\n{self._word}"
