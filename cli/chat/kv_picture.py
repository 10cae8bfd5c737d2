"""A picture of the text that the KV cache holds, for `/kv`.

A strip shows the whole text, and below it stand the passages of which most is held, in the order of
the text, or all heavy tokens. Every (layer, KV head) pair keeps rows of its own, so nearly every
token is held by a few pairs.
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
"""How many of the highest scores are marked."""
# A line break would tear the picture, and a control character the terminal.
VISIBLE = {**dict.fromkeys([*range(32), *range(127, 160)], "\N{MIDDLE DOT}"), 10: "↵", 9: "⇥"}

Indices = npt.NDArray[np.int64]


def kv_picture(llm: Text, width: int, *, shows_all: bool) -> Iterator[str]:
    """The notes that make up the picture.

    Args:
        llm: with the cache.
        width: columns of the screen.
        shows_all: all heavy tokens, in the place of the passages.
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
        yield f"{GAP} left out · [token] heavy hitter: one of the {HITTERS} highest scores"
    elif heavy.size:
        yield f"heavy: {count(heavy.size, 'token')} (/kv all shows them), most of all in"
        yield from _passages(llm, kept, heavy, width)
    if newest < llm.n_tokens:
        yield f"recent: the last {count(llm.n_tokens - newest, 'token')} are held by all pairs"
    lost = llm.n_tokens - len(kept.positions)
    where = "in the archive, where answers look them up" if llm.model.recalls else "forgotten"
    yield f"gone: {count(lost, 'token')}, {where}" if lost else "gone: nothing so far"


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


def _passages(llm: Text, kept: KeptTokens, heavy: Indices, width: int) -> Iterator[str]:
    """The passages of which most rows are held: where they begin, that share, and their text."""
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
    """Tokens of the text, with dots for what is between them, and brackets around hitters."""
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
