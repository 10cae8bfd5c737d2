"""Pieces of text and stop strings, against naive programs that look at the whole text."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence

import numpy as np
import pytest

from pyh2o.writing.pieces import Piece, TextPieces

# Parts of characters, whole ones, an invalid byte, and letters that stop strings are made of.
PARTS = [b"a", b"b", b"ab", b"", b"\xc3", b"\xa9", b"\xe2\x98", b"\xba", b"\xf0\x9f", b"\x98\x80"]
PARTS += ["é".encode(), "b☺a".encode(), b"\xff"]


def random_stops(dice: random.Random) -> list[bytes]:
    letters = [b"a", b"b", "é".encode(), "☺".encode()]
    return [
        b"".join(dice.choices(letters, k=dice.randint(1, 5))) for _ in range(dice.randint(0, 3))
    ]


def first_stop(text: bytes, stops: Sequence[bytes]) -> int | None:
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def safe_length(text: bytes, stops: Sequence[bytes]) -> int:
    """Bytes before the first place where a stop string may have begun."""
    starts = range(len(text))
    may_stop = (start for start in starts if any(s.startswith(text[start:]) for s in stops))
    return next(may_stop, len(text))


def ends_whole(data: bytes) -> bool:
    """Whether no character is incomplete at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    decoder.decode(data)
    return not decoder.getstate()[0]


def test_text_in_pieces_equals_decoding_the_whole_text(dice: random.Random) -> None:
    for _ in range(200):
        check_text_in_pieces(random_stops(dice), dice.choices(PARTS, k=40))


def check_text_in_pieces(stops: list[bytes], parts: list[bytes]) -> None:
    """After each token, all text is out that surely belongs to the result, in whole tokens."""
    text_pieces, text, ends = TextPieces(stops), b"", [0]
    shown, tokens = "", 0
    for part in parts:
        pieces = text_pieces.feed(part)
        text += part
        ends.append(len(text))
        shown += "".join(piece.text for piece in pieces)
        tokens += sum(piece.tokens for piece in pieces)
        if text_pieces.stopped:
            break
        safe = safe_length(text, stops)
        ready = max(n for n, end in enumerate(ends) if end <= safe and ends_whole(text[:end]))
        assert tokens == ready
        assert shown == text[: ends[ready]].decode(errors="ignore")
    assert text_pieces.stopped == (first_stop(text, stops) is not None)
    shown += "".join(piece.text for piece in text_pieces.finish())
    assert shown == text[: first_stop(text, stops)].decode(errors="ignore")


def test_a_piece_is_a_token_or_a_whole_character() -> None:
    text_pieces = TextPieces([b"stop"])
    assert text_pieces.feed(b"x") == [Piece("x", 1)]
    assert text_pieces.feed(b"y\xe2") == []
    assert text_pieces.feed(b"\x98") == []
    assert text_pieces.feed(b"\xbaz") == [Piece("y☺z", 3)]
    assert text_pieces.feed(b"no s") == []
    assert text_pieces.feed(b"t") == []
    assert text_pieces.feed(b"art") == [Piece(text, 1) for text in ("no s", "t", "art")]
    assert text_pieces.feed(b"end: st") == []
    assert text_pieces.feed(b"op it") == []
    assert text_pieces.stopped
    assert text_pieces.finish() == [Piece("end: ", 1)]


@pytest.mark.parametrize("stops", [[], [b"\n\nUser:", b"</s>"]])
def test_a_text_in_pieces_keeps_no_text_it_has_shown(stops: list[bytes]) -> None:
    text_pieces = TextPieces(stops)
    for _ in range(10_000):
        text_pieces.feed(b"\n\nUser")
        text_pieces.feed(b" says ")
    assert text_pieces.held == b""


def test_text_beyond_stop_texts_by_definition(rng: np.random.Generator) -> None:
    """In random cuts, gone on with after every stop text: all bytes, in order, once."""
    stops = ["ab", "bca", "c", "é"]
    encoded = [stop.encode() for stop in stops]
    for _ in range(200):
        letters = rng.choice(["a", "b", "c", "é", "d"], 30).tolist()
        data = "".join(letters).encode()
        text, given, at = TextPieces(encoded), "", 0
        while at < len(data):
            size = int(rng.integers(1, 4))
            pieces = text.feed(data[at : at + size])
            if text.stopped:
                pieces += text.finish()
            given += "".join(piece.text for piece in pieces)
            at += size
            if text.stopped:
                stop = text.held[: text.unsearched].decode()
                assert stop in stops
                rest = (given + text.held.decode(errors="ignore"))[len(given) :]
                assert rest.startswith(stop)
            assert given.encode() + text.held == data[:at]
            if rng.random() < 0.5:
                state = {"held": text.held, "unsearched": text.unsearched, "size": text.size}
                text = TextPieces(encoded, **state)
        assert text.size == len(given.encode())
