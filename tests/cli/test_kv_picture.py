"""What the cache holds: counted over all layers and KV heads, and as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cli_fakes import cache_with
from pyh2o.cache.recalled import RecalledSpan
from pyh2o.cache.rows import KeptTokens, kept_tokens
from pyh2o.cache.statistics import KVStatistics
from pyh2o.cli.chat.kv_picture import arrows, kv_picture, strip
from random_cases import Cases
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama

PAIRS = 8


@dataclass
class FakeText:
    """Its own model; holds rows of a text; `rows` says how many of 8 pairs hold each token."""

    pieces: Sequence[str | bytes]
    rows: Sequence[int]
    scores: Sequence[float]
    pinned: int = 0
    evicting: bool = True
    n_layer: int = 2
    spans: list[RecalledSpan] = field(default_factory=list)

    def recalled(self) -> list[RecalledSpan]:
        return self.spans

    @property
    def n_tokens(self) -> int:
        return len(self.pieces)

    @property
    def kv(self) -> KVStatistics:
        used = sum(self.rows) // PAIRS
        return cache_with(self.n_tokens, pinned=self.pinned, evicting=self.evicting, used=used)

    @property
    def record(self) -> Any:
        return np.arange(self.n_tokens)

    @property
    def model(self) -> FakeText:
        return self

    def kv_rows(self, layer: int) -> tuple[Any, Any]:
        """Positions [4, n]: the pairs hold different tokens, but equally many."""
        heads: list[list[int]] = [[] for _ in range(PAIRS)]
        turn = 0
        for position, rows in enumerate(self.rows):
            for pair in range(turn, turn + rows):
                heads[pair % PAIRS].append(position)
            turn += rows
        own = np.array(heads[layer * 4 : layer * 4 + 4])
        return own, np.array(self.scores)[own]

    def detokenize(self, tokens: list[int], special: bool) -> bytes:
        assert special
        piece = self.pieces[tokens[0]]
        return piece if isinstance(piece, bytes) else piece.encode()


def picture(llm: FakeText, lines: int | None, *, width: int = 60, styles: bool = False) -> str:
    """The picture as it is shown, without spaces at the ends of lines."""
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=styles, highlight=False)
    for note in kv_picture(llm, console, lines):  # type: ignore[arg-type]
        console.print(note, markup=False)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def words(count: int) -> list[str]:
    return [f" w{number}" for number in range(count)]


def text_of(*held: tuple[int, int], count: int = 40, newest: int = 4) -> FakeText:
    """Words, some of which are held by so many pairs: (number, pairs); the newest ones by all."""
    rows = [0] * count
    for number, pairs in held:
        rows[number] = pairs
    rows[count - newest :] = [PAIRS] * newest
    assert sum(rows) % PAIRS == 0
    return FakeText(words(count), rows, scores=[float(n == 12) for n in range(count)])


def test_picture_of_an_empty_cache() -> None:
    assert picture(FakeText([], [], []), 10) == "the KV cache is empty\n"


def test_picture_of_pinned_heavy_and_recent_tokens() -> None:
    llm = text_of((0, 8), (1, 8), (5, 2), (12, 6), (13, 3), (30, 5))
    llm.pinned = 2
    assert (
        picture(llm, None)
        == """\
KV 8/300 cells · 10 of 40 tokens of the text are held by at
least one of 8 (layer, KV head) pairs
██   ▂      ▆▃                ▅     ████
0                                     40
pinned: the first 2 tokens
 w0 w1
heavy: all tokens that are held
· w5· [w12] w13··· w30·
recent: the last 4 tokens are held by all pairs
 w36 w37 w38 w39
[token] heavy hitter: one of the 20 highest scores · left
out: · up to 9 tokens, ··· up to 99
"""
    )


def test_picture_of_what_was_recalled() -> None:
    llm = text_of((5, 4), (12, 4))
    llm.spans = [RecalledSpan(7, 9, " w7 w8", 0.5), RecalledSpan(20, 21, " w20", 0.1)]
    lines = picture(llm, None).splitlines()
    assert lines[2:6] == [
        "     ▄      ▄                       ████",
        "       ↑↑           ↑",
        "0                                     40",
        "↑ recalled: 2 passages of 3 tokens; /recalled shows them",
    ]


def test_arrows_stand_under_the_strip(cases: Cases) -> None:
    """Under every column that has a token of a span, and under no other."""
    for _, rng in cases(range(100)):
        n_tokens = int(rng.integers(1, 500))
        width = int(rng.integers(1, min(80, n_tokens) + 1))
        start = int(rng.integers(0, n_tokens))
        end = int(rng.integers(start + 1, n_tokens + 1))
        edges = np.arange(width + 1) * n_tokens // width
        marked = (edges[:-1] < end) & (edges[1:] > start)
        line = arrows([RecalledSpan(start, end, "", 1.0)], n_tokens, width)
        assert line == "".join(" ↑"[mark] for mark in marked.astype(int))


def test_picture_in_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    llm = text_of((5, 1), (12, 6), (13, 3), (30, 5), (31, 1))
    lines = picture(llm, None, width=200, styles=True).splitlines()
    faint, end = "\x1b[2m", "\x1b[0m"
    assert lines[4] == (
        f"{faint}·{end}{faint} w5{end}{faint}·{end}\x1b[1;4;31m w12{end} w13{faint}···{end}"
        f"\x1b[33m w30{end}{faint} w31{end}{faint}·{end}"
    )
    assert lines[6] == " w36 w37 w38 w39"


def test_picture_of_few_lines_shows_what_most_pairs_hold() -> None:
    held = [(number, 1 + number % 7) for number in range(0, 600, 3)]
    llm = text_of(*held, (601, 1), (800, 8), count=1000, newest=100)
    lines = picture(llm, 1).splitlines()
    assert lines[4:] == [
        "heavy: the 6 tokens that most pairs hold (7 or more of 8);",
        "/kv all shows all",
        "· w6··· w27··· w48··· w69··· w90···(709 tokens)··· w800···",
        "recent: the last 100 tokens are held by all pairs",
        " w900 w901 w902 w903 w904 w905 w906 w907 w908··· w991 w992",
        "w993 w994 w995 w996 w997 w998 w999",
        "[token] heavy hitter: one of the 20 highest scores · left",
        "out: · up to 9 tokens, ··· up to 99",
    ]


def test_gaps_that_are_evicted_altogether() -> None:
    llm = text_of((0, 8), (150, 8), count=300)
    lines = picture(llm, None, width=200).splitlines()
    assert lines[4] == " w0···(149 tokens evicted)··· w150···(145 tokens evicted)···"


def test_picture_of_odd_pieces() -> None:
    """Line breaks, control characters, and characters that take several tokens."""
    pieces = ["a\n", "\t", "\x1b[2J", b"\xc3", b"\xa9", b"\xc3", "x", b"\xa9", "<|im_end|>"]
    llm = FakeText(pieces, [PAIRS] * len(pieces), [0.0] * len(pieces))
    lines = picture(llm, 5).splitlines()
    assert lines[-1] == "a↵⇥·[2Jé\N{REPLACEMENT CHARACTER}x\N{REPLACEMENT CHARACTER}<|im_end|>"


def test_picture_of_a_full_cache() -> None:
    llm = FakeText(words(500), [PAIRS] * 500, [0.0] * 500, evicting=False)
    assert picture(llm, 5, width=40).splitlines() == [
        "KV 500/300 cells · 500 of 500 tokens of",
        "the text are held",
        "█" * 40,
        f"0{'500':>39}",
        "recent: the last 500 tokens",
        " w0 w1 w2 w3 w4 w5 w6 w7 w8···(486",
        "tokens)··· w495 w496 w497 w498 w499",
    ]


@pytest.mark.parametrize(
    ("positions", "rows", "n_tokens", "width", "blocks"),
    [
        ([0, 1, 2, 3], [8, 4, 1, 8], 4, 80, "█▄▁█"),
        ([0, 1, 2, 3], [8, 4, 1, 8], 8, 4, "▆▅  "),
        ([7], [1], 8, 4, "   ▁"),
        ([0], [8], 1, 80, "█"),
    ],
)
def test_strip_shows_the_share_of_rows_that_is_kept(
    positions: list[int], rows: list[int], n_tokens: int, width: int, blocks: str
) -> None:
    kept = KeptTokens(np.array(positions), np.array(rows), np.zeros(len(rows)), pairs=8)
    assert strip(kept, n_tokens, width) == blocks


def test_kept_tokens_are_those_of_all_layers_and_heads(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", seed=3, n_layer=3, n_head_kv=2)
    llm = tiny_llama(path, n_ctx=256, hh=16, recent=16, slack=8)
    llm.eval(rng.integers(3, 380, size=200).tolist())
    kept = kept_tokens(llm.text)
    rows, scores = np.zeros(200), np.zeros(200)
    for layer in range(3):
        for positions, layer_scores in zip(*llm.kv_rows(layer), strict=True):
            rows[positions] += 1
            scores[positions] += layer_scores
    assert kept.pairs == 6
    assert kept.positions.tolist() == np.flatnonzero(rows).tolist()
    assert kept.rows.tolist() == rows[rows > 0].tolist()
    np.testing.assert_allclose(kept.scores, scores[rows > 0] / 6, rtol=1e-6)
    assert kept.shares.tolist() == (rows[rows > 0] / 6).tolist()
    hitters = [hitter.position for hitter in llm.heavy_hitters(10)]
    assert kept.positions[kept.heaviest(10)].tolist() == hitters
    assert kept.rows.sum() == 6 * llm.kv.used


def test_heaviest_of_equals_is_the_newer() -> None:
    kept = KeptTokens(np.arange(4), np.ones(4, int), np.array([1.0, 2.0, 2.0, 0.0]), pairs=1)
    assert kept.heaviest(3).tolist() == [2, 1, 0]
