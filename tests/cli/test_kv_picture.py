"""What the cache holds: counted over all layers and KV heads, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli_fakes import cache_with
from pyh2o.cache.statistics import KVStatistics
from pyh2o.cli.chat.kv_picture import kv_picture, strip
from pyh2o.core.rows import KeptTokens, kept_tokens
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
    recalls: bool = False
    n_layer: int = 2

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

    def detokenize(self, tokens: list[int], special: bool = False) -> bytes:
        assert special == (len(tokens) == 1)
        pieces = [self.pieces[token] for token in tokens]
        return b"".join(each if isinstance(each, bytes) else each.encode() for each in pieces)


def picture(llm: FakeText, *, shows_all: bool = True, width: int = 60) -> list[str]:
    return list(kv_picture(llm, width, shows_all=shows_all))  # type: ignore[arg-type]


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


def test_picture_of_an_empty_and_of_a_full_cache() -> None:
    assert picture(FakeText([], [], [])) == ["the KV cache is empty"]
    full = FakeText(words(500), [PAIRS] * 500, [0.0] * 500, evicting=False)
    assert picture(full) == ["the full cache holds all 500 tokens of the text"]


def test_picture_of_pinned_heavy_and_recent_tokens() -> None:
    llm = text_of((0, 8), (1, 8), (5, 2), (12, 6), (13, 3), (30, 5))
    llm.pinned = 2
    assert picture(llm) == [
        "KV 8/300 cells · 10 of 40 tokens of the text are held by at least one of 8 (layer, KV "
        "head) pairs",
        "██   ▂      ▆▃                ▅     ████",
        "0                                     40",
        "pinned: the first 2 tokens",
        "heavy: 4 tokens",
        "··· w5··· [w12] w13··· w30···",
        "··· evicted · [token] heavy hitter: one of the 20 highest scores",
        "recent: the last 4 tokens are held by all pairs",
        "evicted: 30 tokens",
    ]


def test_picture_of_the_passages_held_best() -> None:
    held = [
        (number, 4) for number in (*range(50, 70), *range(100, 104), *range(480, 504), 800, 801)
    ]
    llm = text_of(*held, count=1000, newest=100)
    llm.recalls = True
    llm.pieces = [" w\n" if number == 481 else text for number, text in enumerate(llm.pieces)]
    assert picture(llm, shows_all=False)[3:] == [
        "heavy: 50 tokens (/kv all shows them), most rows in",
        "      48  42%  w48 w49 w50 w51 w52 w53 w54 w55 w56 w57 w58",
        "      96   8%  w96 w97 w98 w99 w100 w101 w102 w103 w104 w10",
        "     480  50%  w480 w w482 w483 w484 w485 w486 w487 w488 w4",
        "     792   4%  w792 w793 w794 w795 w796 w797 w798 w799 w800",
        "recent: the last 100 tokens are held by all pairs",
        "evicted: 850 tokens, in the archive for recall",
    ]


def test_picture_of_odd_pieces() -> None:
    """Line breaks, control characters, and characters that take several tokens."""
    pieces = ["a\n", "\t", "\x1b[2J", b"\xc3", b"\xa9", b"\xc3", "x", b"\xa9", "<|im_end|>", "."]
    rows = [PAIRS - 1] * 8 + [0, PAIRS]
    lines = picture(FakeText(pieces, rows, [0.0] * len(pieces)))
    assert lines[4] == "···a↵⇥·[2Jé\N{REPLACEMENT CHARACTER}x\N{REPLACEMENT CHARACTER}···"


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
