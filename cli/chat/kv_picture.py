"""A picture of the text that the KV cache holds, for `/kv`.

A strip shows the whole text, and below it stand the tokens that are kept, in the order of the text.
Every (layer, KV head) pair keeps rows of its own, so nearly every token is held by a few pairs: a
picture of so many lines shows the tokens that most pairs hold, and marks what is left out. Arrows
under the strip show where passages are that came back from the archive.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from pyh2o.cache.rows import KeptTokens, kept_tokens

from ..terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.cache.recalled import RecalledSpan
    from pyh2o.core.text import Text as ModelText

BLOCKS = " ▁▂▃▄▅▆▇█"
ARROW = "↑"
STRIP_WIDTH = 80
HITTERS = 20
"""How many of the highest scores are marked."""
PINNED_LINES = RECENT_LINES = 2
FEW, MANY = 10, 100
"""From so many tokens on, a gap is shown by three dots, and by its size."""

FAINT = Style(dim=True)
HITTER = Style(bold=True, underline=True)
# By the share of the pairs that hold a token.
HELD_BY = ((0.25, FAINT), (0.5, Style.null()), (0.75, Style(color="yellow")))
HELD_BY_MOST = Style(color="red")

# A line break would tear the picture, and a control character the terminal.
VISIBLE = {**dict.fromkeys([*range(32), *range(127, 160)], "\N{MIDDLE DOT}"), 10: "↵", 9: "⇥"}

Indices = npt.NDArray[np.int64]


def kv_picture(llm: ModelText, console: Console, lines: int | None) -> Iterator[str | Text]:
    """The notes that make up the picture.

    Args:
        llm: with the cache.
        console: where they will be shown.
        lines: about how many lines of tokens to show beside the pinned and the recent ones; None
            shows every token that is held.
    """
    kv = llm.kv
    if llm.n_tokens == 0:
        yield "the KV cache is empty"
        return
    kept = kept_tokens(llm)
    painter = Painter(llm, kept, with_styles=console.is_terminal and not console.is_dumb_terminal)
    width = console.width
    yield (
        f"KV {kv.used:,}/{kv.capacity:,} cells · {len(kept.positions):,} of {llm.n_tokens:,} "
        f"tokens of the text are held"
        + (f" by at least one of {kept.pairs:,} (layer, KV head) pairs" if kv.evicting else "")
    )
    blocks = strip(kept, llm.n_tokens, min(width, STRIP_WIDTH))
    yield blocks
    spans = llm.recalled()
    if spans:
        yield arrows(spans, llm.n_tokens, len(blocks))
    yield f"0{f'{llm.n_tokens:,}':>{len(blocks) - 1}}"
    if spans:
        n_recalled = sum(span.end - span.start for span in spans)
        passages = f"{count(len(spans), 'passage')} of {count(n_recalled, 'token')}"
        yield Text(f"{ARROW} recalled: {passages}; /recalled shows them", FAINT)
    newest = max(kv.pinned, _newest(kept, llm.n_tokens) if kv.evicting else 0)
    pinned, between, recent = np.split(
        np.arange(len(kept.positions)), np.searchsorted(kept.positions, [kv.pinned, newest])
    )
    if pinned.size:
        yield Text(f"pinned: the first {count(pinned.size, 'token')}", FAINT)
        yield painter.ends(pinned, None if lines is None else PINNED_LINES * width)
    if newest > pinned.size:
        shown = between if lines is None else painter.most_held(between, lines * width)
        yield Text(_which(kept, between, shown), FAINT)
        yield painter.span(shown, pinned.size, newest)
    if recent.size:
        by_all = " are held by all pairs" if kv.evicting else ""
        yield Text(f"recent: the last {count(recent.size, 'token')}{by_all}", FAINT)
        yield painter.ends(recent, None if lines is None else RECENT_LINES * width)
    if between.size:
        yield painter.legend()


def _newest(kept: KeptTokens, n_tokens: int) -> int:
    """The position from which on every pair holds every token.

    These are the recent tokens, and those that the next compaction will choose from for the first
    time.
    """
    behind = np.arange(len(kept.positions))[::-1]
    whole = (kept.rows == kept.pairs) & (kept.positions + behind == n_tokens - 1)
    return n_tokens - int(np.append(~whole[::-1], True).argmax())


def strip(kept: KeptTokens, n_tokens: int, width: int) -> str:
    """The whole text as one line of blocks: the higher, the more of its rows are kept."""
    width = min(width, n_tokens)
    edges = np.arange(width + 1) * n_tokens // width
    held = np.concatenate([[0], np.cumsum(kept.shares)])
    sums = np.diff(held[np.searchsorted(kept.positions, edges)])
    levels = np.ceil(sums / np.diff(edges) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[level] for level in levels.clip(0, len(BLOCKS) - 1))


def arrows(spans: Sequence[RecalledSpan], n_tokens: int, width: int) -> str:
    """A line for under a strip of that width: an arrow wherever it has tokens of a span."""
    marks = [" "] * width
    for span in spans:
        # the last column whose tokens begin at or before the span's, and the one of its last token
        first, last = (((at + 1) * width - 1) // n_tokens for at in (span.start, span.end - 1))
        marks[first : last + 1] = ARROW * (last + 1 - first)
    return "".join(marks)


def _which(kept: KeptTokens, between: Indices, shown: Indices) -> str:
    if shown.size == between.size:
        return "heavy: all tokens that are held"
    fewest = int(kept.rows[shown].min()) if shown.size else kept.pairs
    held = "all" if fewest == kept.pairs else f"{fewest:,} or more of {kept.pairs:,}"
    return f"heavy: the {shown.size:,} tokens that most pairs hold ({held}); /kv all shows all"


class Painter:
    """Writes tokens with the marks that tell how much of them is kept."""

    def __init__(self, llm: ModelText, kept: KeptTokens, with_styles: bool) -> None:
        self._llm = llm
        self._kept = kept
        self._with_styles = with_styles
        self._hitters = frozenset(i for i in kept.heaviest(HITTERS).tolist() if kept.scores[i] > 0)

    def most_held(self, candidates: Indices, cells: int) -> Indices:
        """As many candidates as fit so many columns, by pairs that hold them, then by score."""
        kept = self._kept
        ranked = candidates[np.lexsort((-kept.scores[candidates], -kept.rows[candidates]))]
        ranked = ranked[:cells]  # a token takes a column or more
        widths = np.cumsum([0, *self._widths(ranked)])

        def columns(n: int) -> int:
            """The columns of the first n tokens and of the gaps between them."""
            gaps = np.diff(np.sort(kept.positions[ranked[:n]])) - 1
            gap_widths = np.select([gaps == 0, gaps < FEW, gaps < MANY], [0, 1, 3], 22)
            return int(widths[n] + gap_widths.sum())

        most = bisect_right(range(len(ranked) + 1), cells, key=columns) - 1
        return np.sort(ranked[:most])

    def span(self, indices: Indices, start: int, end: int, *, marked: bool = True) -> Text:
        """Tokens of the text from position `start` up to `end`, with the gaps, and marks."""
        line = Text()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        expected = start
        for index in indices.tolist():
            position = int(self._kept.positions[index])
            if position != expected:
                line.append(self._gap(expected, position), FAINT)
                decoder.reset()
            piece = decoder.decode(self._bytes(index)).translate(VISIBLE)
            line.append_text(self._marked(piece, index) if marked else Text(piece))
            expected = position + 1
        if expected != end:
            line.append(self._gap(expected, end), FAINT)
        return line

    def ends(self, indices: Indices, cells: int | None) -> Text:
        """Tokens without gaps; the middle is left out where they take more columns than that."""
        positions = self._kept.positions[indices]
        if cells is not None and indices.size > FEW:
            widths = self._widths(indices)
            if widths.sum() > cells:
                room = (cells - len("···(1,000,000 tokens)···")) // 2
                first = np.searchsorted(np.cumsum(widths), room, side="right")
                last = np.searchsorted(np.cumsum(widths[::-1]), room, side="right")
                indices = np.concatenate([indices[:first], indices[-last:]])
        return self.span(indices, int(positions[0]), int(positions[-1]) + 1, marked=False)

    def legend(self) -> Text:
        """What the marks mean."""
        legend = Text()
        if self._with_styles:
            legend.append("held by ", FAINT)
            for limit, style in HELD_BY:
                legend.append(f"less than {limit:.0%}", style).append(", ", FAINT)
            legend.append("more", HELD_BY_MOST).append(" of the pairs · ", FAINT)
            legend.append("heavy hitter", HITTER)
        else:
            legend.append("[token] heavy hitter")
        legend.append(f": one of the {HITTERS} highest scores · left out: ", FAINT)
        return legend.append(f"· up to {FEW - 1} tokens, ··· up to {MANY - 1}", FAINT)

    def _marked(self, piece: str, index: int) -> Text:
        hitter = index in self._hitters
        if self._with_styles:
            share = self._kept.rows[index] / self._kept.pairs
            style = next((style for limit, style in HELD_BY if share < limit), HELD_BY_MOST)
            return Text(piece, style + HITTER if hitter else style)
        word = piece.lstrip()
        return Text(f"{piece[: len(piece) - len(word)]}[{word}]" if hitter else piece)

    def _gap(self, start: int, end: int) -> str:
        """Tokens that are not shown, few of them as dots."""
        size = end - start
        if size < FEW:
            return "·"
        if size < MANY:
            return "···"
        first, last = np.searchsorted(self._kept.positions, [start, end])
        return f"···({size:,} tokens{'' if last > first else ' evicted'})···"

    def _bytes(self, index: int) -> bytes:
        token = int(self._llm.record[self._kept.positions[index]])
        return bytes(self._llm.model.detokenize([token], special=True))

    def _widths(self, indices: Indices) -> Indices:
        """The columns that each token takes on the screen."""
        texts = (self._bytes(index).decode("utf-8", errors="replace") for index in indices.tolist())
        return np.array([cell_len(text.translate(VISIBLE)) for text in texts], dtype=np.int64)
