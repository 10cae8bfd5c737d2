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

# Within a line: its end, marks that may begin or end something, and the text between them.
INLINE = re.compile(r"\n|`+|\*+|[^\n`*]+")
INLINE_IN_CODE = re.compile(r"\n|[^\n]+")


@contextmanager
def answer_writer(*, markdown: bool) -> Iterator[Callable[[str], None]]:
    """What shows the pieces of an answer on stdout, coloured as Markdown or as they are."""
    styler = MarkdownStyler()

    def show(segments: list[tuple[str, Style]]) -> None:
        terminal.write("".join(paint(harmless(text), style) for text, style in segments))

    try:
        yield (lambda text: show(styler.feed(text))) if markdown else terminal.show
    finally:
        show(styler.finish())
        terminal.end_line()


class MarkdownStyler:
    """Gives each character of a text its style, whatever pieces the text comes in.

    Block marks count at the beginning of a line, inline ones within a line: a mark that is never
    closed ends with its line.
    """

    def __init__(self) -> None:
        self._rest = ""  # held back until the character after it is known
        self._segments: list[tuple[str, Style]] = []
        self._fence = ""  # the mark that began the code block we are in
        self._begin_line()

    def feed(self, text: str) -> list[tuple[str, Style]]:
        """Text whose style is known now, in segments of one style."""
        self._rest += text
        return self._take(is_whole=False)

    def finish(self) -> list[tuple[str, Style]]:
        """The rest of the text."""
        return self._take(is_whole=True)

    def _begin_line(self) -> None:
        self._at_start = True
        self._previous = ""  # character of the line
        self._line_style = PLAIN
        self._bold = self._italic = False
        self._code = ""  # the mark that began the inline code we are in

    def _take(self, *, is_whole: bool) -> list[tuple[str, Style]]:
        while self._rest:
            if self._at_start:
                undecided = UNDECIDED_IN_CODE if self._fence else UNDECIDED
                if undecided.fullmatch(self._rest) and not is_whole:
                    break
                self._decide()
            if not self._rest:
                break
            found = (INLINE_IN_CODE if self._line_style is CODE else INLINE).match(self._rest)
            assert found is not None  # one of the two takes any character
            text, rest = found[0], self._rest[found.end() :]
            if text[0] in "`*" and self._line_style is not CODE:
                if not rest and not is_whole:
                    break
                self._rest = rest
                self._mark(text, rest[:1])
                continue
            self._rest = rest
            if text == "\n":
                self._emit(text, PLAIN)
                self._begin_line()
            else:
                self._emit(text, self._style())
        segments, self._segments = self._segments, []
        return segments

    def _decide(self) -> None:
        """The kind of a line, from its beginning."""
        self._at_start = False
        fence = FENCE.match(self._rest)
        if self._fence:
            self._line_style = CODE
            line = self._rest.partition("\n")[0].strip()
            if line.startswith(self._fence) and not line.strip(self._fence[0]):
                self._fence = ""
        elif fence:
            self._line_style, self._fence = CODE, fence[1]
        elif HEADING_LINE.match(self._rest):
            self._line_style = HEADING
        elif QUOTE_LINE.match(self._rest):
            self._line_style = QUOTE
        elif item := LIST_ITEM.match(self._rest):
            self._rest = self._rest[item.end() :]
            self._emit(item[0], MARK)

    def _mark(self, mark: str, following: str) -> None:
        """Let a mark begin or end something, by the characters around it."""
        style, size = self._style(), len(mark)
        opens, closes = bool(following.strip()), bool(self._previous.strip())
        if mark[0] == "`":
            if self._code or following.strip("\n"):
                style = CODE
                self._code = "" if mark == self._code else self._code or mark
        elif self._code or size > 3:
            pass
        elif closes and (self._bold or size == 1) and (self._italic or size == 2):
            self._toggle(size)
        elif opens and not (self._bold and size > 1) and not (self._italic and size != 2):
            self._toggle(size)
            style = self._style()
        self._emit(mark, style)

    def _toggle(self, size: int) -> None:
        if size != 2:
            self._italic = not self._italic
        if size != 1:
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
