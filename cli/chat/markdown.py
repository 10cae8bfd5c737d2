"""Markdown coloured while it streams: nothing is drawn twice, and no character is changed.

The marks of Markdown stay visible, so that text copied from the screen is what the model wrote.
Redrawing finished Markdown instead would flicker, and lose what has scrolled off the screen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.style import Style

from ..terminal.terminal import harmless, paint, terminal

PLAIN = Style.null()
HEADING = Style(bold=True, color="magenta")
CODE = Style(color="cyan")
MARK = Style(color="yellow")
QUOTE = Style(color="green")
BOLD = Style(bold=True)
ITALIC = Style(italic=True)

# The beginning of a line that does not yet show what kind of line it is.
UNDECIDED = re.compile(r"[ \t]*(#{1,6}|[-+*]|\d{1,9}[.)]?|`+|~+|>)?")
UNDECIDED_IN_CODE = re.compile(r"[ \t]*(`+|~+)?[ \t]*")
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})")
HEADING_LINE = re.compile(r" {0,3}#{1,6}[ \t]")
LIST_ITEM = re.compile(r"[ \t]*([-+*]|\d{1,9}[.)])[ \t]")
QUOTE_LINE = re.compile(r"[ \t]*>")


@contextmanager
def answer_writer(*, markdown: bool) -> Iterator[Callable[[str], None]]:
    """What shows the pieces of an answer on stdout, coloured as Markdown or as they are."""
    writer = MarkdownWriter(terminal.write)
    try:
        yield writer.write if markdown else terminal.show
    finally:
        writer.finish()
        terminal.end_line()


class MarkdownWriter:
    """Writes a text in pieces; each is shown at once but for marks whose meaning is open yet."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._styler = MarkdownStyler()

    def write(self, text: str) -> None:
        """Show a piece of the text."""
        self._show(self._styler.feed(text))

    def finish(self) -> None:
        """Show what was held back, and begin anew."""
        self._show(self._styler.finish())
        self._styler = MarkdownStyler()

    def _show(self, segments: list[tuple[str, Style]]) -> None:
        self._write("".join(paint(harmless(text), style) for text, style in segments))


class MarkdownStyler:
    """Gives each character of a text its style, whatever pieces the text comes in.

    Block marks count at the beginning of a line, inline ones within a line: a mark that is never
    closed ends with its line.
    """

    def __init__(self) -> None:
        self._segments: list[tuple[str, Style]] = []
        self._fence = ""  # the mark that began the code block we are in
        self._begin_line()

    def feed(self, text: str) -> list[tuple[str, Style]]:
        """Text whose style is known now, in segments of one style."""
        for character in text:
            self._take(character)
        return self._taken()

    def finish(self) -> list[tuple[str, Style]]:
        """The rest of the text."""
        if self._at_start:
            self._decide()
        self._end_run("")
        return self._taken()

    def _taken(self) -> list[tuple[str, Style]]:
        segments, self._segments = self._segments, []
        return segments

    def _begin_line(self) -> None:
        self._at_start = True
        self._opening = ""  # held back until the kind of the line is known
        self._run = ""  # equal marks held back until the character after them is known
        self._previous = ""
        self._line_style = PLAIN
        self._bold = self._italic = False
        self._code = ""  # the mark that began the inline code we are in

    def _take(self, character: str) -> None:
        if self._at_start:
            self._opening += character
            pattern = UNDECIDED_IN_CODE if self._fence else UNDECIDED
            if pattern.fullmatch(self._opening) is None:
                self._decide()
        else:
            self._inline(character)

    def _decide(self) -> None:
        """The kind of a line, from its beginning."""
        opening, self._opening, self._at_start = self._opening, "", False
        marks = 0  # characters of the opening that are no text
        fence = FENCE.match(opening)
        if self._fence:
            self._line_style = CODE
            if opening.strip().startswith(self._fence) and not opening.strip().strip(self._fence):
                self._fence = ""
        elif fence:
            self._line_style = CODE
            self._fence = fence[1]
        elif HEADING_LINE.match(opening):
            self._line_style = HEADING
        elif QUOTE_LINE.match(opening):
            self._line_style = QUOTE
        elif item := LIST_ITEM.match(opening):
            marks = item.end()
            self._emit(opening[:marks], MARK)
        for character in opening[marks:]:
            self._inline(character)

    def _inline(self, character: str) -> None:
        if self._run and character != self._run[0]:
            self._end_run(character)
        if character == "\n":
            self._emit(character, PLAIN)
            self._begin_line()
        elif self._line_style is CODE:
            self._emit(character, CODE)
        elif character in "*`":
            self._run += character
        else:
            self._emit(character, self._style())

    def _end_run(self, following: str) -> None:
        """Let marks begin or end something, now that the character after them is known."""
        run, self._run = self._run, ""
        if not run:
            return
        opens = bool(following.strip())
        closes = bool(self._previous.strip())
        if run[0] == "`":
            self._end_code_run(run, bool(following.strip("\n")))
        elif self._code or len(run) > 3:
            self._emit(run, self._style())
        elif closes and (self._bold or len(run) == 1) and (self._italic or len(run) == 2):
            self._emit(run, self._style())
            self._toggle(run)
        elif opens and not (self._bold and len(run) > 1) and not (self._italic and len(run) != 2):
            self._toggle(run)
            self._emit(run, self._style())
        else:
            self._emit(run, self._style())

    def _end_code_run(self, run: str, opens: bool) -> None:
        if self._code:
            self._emit(run, CODE)
            if run == self._code:
                self._code = ""
        elif opens:
            self._code = run
            self._emit(run, CODE)
        else:
            self._emit(run, self._style())

    def _toggle(self, run: str) -> None:
        if len(run) != 2:
            self._italic = not self._italic
        if len(run) != 1:
            self._bold = not self._bold

    def _style(self) -> Style:
        if self._code:
            return CODE
        style = self._line_style
        if self._bold:
            style += BOLD
        return style + ITALIC if self._italic else style

    def _emit(self, text: str, style: Style) -> None:
        self._previous = text[-1]
        if self._segments and self._segments[-1][1] == style:
            text = self._segments.pop()[0] + text
        self._segments.append((text, style))
