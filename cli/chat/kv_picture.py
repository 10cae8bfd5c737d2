"""A picture of the contents of the KV cache, for `/kv`.

A strip shows the whole text. Below it are the passages with most rows, in text order, or all heavy
tokens. Every (layer, KV head) pair keeps its own rows, so nearly every token is held by some pairs.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.cells import set_cell_size

from ..terminal.wording import count

if TYPE_CHECKING:
    from pyh2o.core.rows import KeptTokens
    from pyh2o.core.text import Text

BLOCKS = " ▁▂▃▄▅▆▇█"
GAP = "···"
STRIP_WIDTH = 80
PASSAGES = 5
PASSAGE_TOKENS = 24
HITTERS = 20
"""Number of highest scores to mark."""
# Visible replacements of line breaks and control characters.
VISIBLE = {**dict.fromkeys([*range(32), *range(127, 160)], "\N{MIDDLE DOT}"), 10: "↵", 9: "⇥"}

Indices = npt.NDArray[np.int64]


def kv_picture(llm: Text, width: int, *, shows_all: bool) -> Iterator[str]:
    """Yield the lines of the picture.

    Args:
        llm: the text.
        width: number of columns of the terminal.
        shows_all: whether to show all heavy tokens instead of passages.
    """
    kv = llm.kv
    if llm.n_tokens == 0:
        yield "the KV cache is empty"
        return
    if not kv.evicting:
        yield f"the full cache holds all {count(llm.n_tokens, 'token')} of the text"
        return
    # imported here because it loads llama.cpp, which would delay `--help`
    from pyh2o.core.rows import kept_tokens

    kept = kept_tokens(llm)
    yield (
        f"KV {kv.used:,}/{kv.capacity:,} cells · {len(kept.positions):,} of {llm.n_tokens:,} "
        f"tokens of the text are held by at least one of {kept.pairs:,} (layer, KV head) pairs"
    )
    blocks = strip(kept, llm.n_tokens, min(width, STRIP_WIDTH))
    yield blocks
    yield f"0{f'{llm.n_tokens:,}':>{len(blocks) - 1}}"
    newest = _newest(kept, llm.n_tokens)
    heavy = np.flatnonzero((kept.positions >= kv.pinned) & (kept.positions < newest))
    if kv.pinned:
        yield f"pinned: the first {count(kv.pinned, 'token')}"
    if heavy.size and shows_all:
        yield f"heavy: {count(heavy.size, 'token')}"
        yield _tokens(llm, kept, heavy)
        yield f"{GAP} evicted · [token] heavy hitter: one of the {HITTERS} highest scores"
    elif heavy.size:
        yield f"heavy: {count(heavy.size, 'token')} (/kv all shows them), most rows in"
        yield from _passages(llm, kept, heavy, width)
    if newest < llm.n_tokens:
        yield f"recent: the last {count(llm.n_tokens - newest, 'token')} are held by all pairs"
    evicted = llm.n_tokens - len(kept.positions)
    where = ", in the archive for recall" if llm.model.recalls else ""
    yield f"evicted: {count(evicted, 'token')}{where}" if evicted else "evicted: nothing so far"


def _newest(kept: KeptTokens, n_tokens: int) -> int:
    """Return the position from which every pair holds every token.

    These are the recent tokens, and those that no compaction has considered yet.
    """
    n_after = np.arange(len(kept.positions))[::-1]
    whole = (kept.rows == kept.pairs) & (kept.positions + n_after == n_tokens - 1)
    return n_tokens - int(np.append(~whole[::-1], True).argmax())


def strip(kept: KeptTokens, n_tokens: int, width: int) -> str:
    """Return the text as a line of blocks, whose height is the share of kept rows."""
    width = min(width, n_tokens)
    edges = np.arange(width + 1) * n_tokens // width
    held = np.concatenate([[0], np.cumsum(kept.shares)])
    sums = np.diff(held[np.searchsorted(kept.positions, edges)])
    levels = np.ceil(sums / np.diff(edges) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[level] for level in levels.clip(0, len(BLOCKS) - 1))


def _passages(llm: Text, kept: KeptTokens, heavy: Indices, width: int) -> Iterator[str]:
    """Yield the passages with most kept rows: start, share of kept rows and text."""
    numbers = kept.positions[heavy] // PASSAGE_TOKENS
    held = np.bincount(numbers, kept.shares[heavy]) / PASSAGE_TOKENS
    for number in np.sort(np.argsort(-held, kind="stable")[:PASSAGES]).tolist():
        start = number * PASSAGE_TOKENS
        tokens = llm.record[start : min(start + PASSAGE_TOKENS, llm.n_tokens)].tolist()
        text = llm.model.detokenize(tokens).decode(errors="ignore")
        if held[number]:
            line = f"{start:>8,} {held[number]:>4.0%}  {' '.join(text.split()).translate(VISIBLE)}"
            yield set_cell_size(line, width - 1).rstrip()


def _tokens(llm: Text, kept: KeptTokens, indices: Indices) -> str:
    """Return the texts of tokens, with dots for gaps and brackets around heavy hitters."""
    hitters = {index for index in kept.heaviest(HITTERS).tolist() if kept.scores[index] > 0}
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    line, expected = "", -1
    for index in indices.tolist():
        position = int(kept.positions[index])
        if position != expected:
            line += GAP
            decoder.reset()
        piece = decoder.decode(_bytes(llm, kept, index)).translate(VISIBLE)
        word = piece.lstrip()
        line += f"{piece[: len(piece) - len(word)]}[{word}]" if index in hitters else piece
        expected = position + 1
    return line + GAP


def _bytes(llm: Text, kept: KeptTokens, index: int) -> bytes:
    token = int(llm.record[kept.positions[index]])
    return bytes(llm.model.detokenize([token], special=True))
