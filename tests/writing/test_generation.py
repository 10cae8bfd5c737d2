"""The loop of all generated texts, with tokens that stand for bytes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pyh2o.writing.finish import FINISH_LENGTH, FINISH_STOP, FINISH_UNTIL
from pyh2o.writing.generation import Generation
from pyh2o.writing.pieces import TextPieces

END = -1


class Bytes:
    """A detokenizer of tokens that are bytes; it holds `held` back until the end."""

    def __init__(self, held: bytes = b"") -> None:
        self._held = held

    def feed(self, token: int) -> bytes:
        return bytes([token])

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def piece(self, token: int) -> bytes:
        return bytes([token])


def generation(*stops: str, held: bytes = b"", **arguments: object) -> Generation:
    pieces = TextPieces([stop.encode() for stop in stops])
    return Generation([], Bytes(held), pieces, is_end=lambda token: token == END, **arguments)


def run(made: Generation, tokens: Iterable[int]) -> list[str]:
    return ["".join(piece.text for piece in pieces) for pieces in made.run(tokens)]


def rest(made: Generation) -> str:
    return "".join(piece.text for piece in made.end())


def test_the_end_token_is_no_part_of_the_text() -> None:
    made = generation()
    assert run(made, [*b"ab", END, *b"c"]) == ["a", "b"]
    assert (made.tokens, made.finish, made.taken, made.kept) == (list(b"ab"), FINISH_STOP, 2, 2)


def test_tokens_that_end_by_themselves_leave_the_reason_to_others() -> None:
    made = generation(limit=3)
    assert run(made, b"ab") == ["a", "b"]
    assert made.finish is None
    assert rest(made) == ""


def test_the_limit_is_exact_and_no_further_token_is_asked_for() -> None:
    tokens = iter(b"abcd")
    made = generation(limit=3)
    assert run(made, tokens) == ["a", "b", "c"]
    assert made.finish == FINISH_LENGTH
    assert list(tokens) == list(b"d")


def test_a_stop_string_is_cut_off_and_its_tokens_are_not_kept() -> None:
    made = generation("stop", at_stop=FINISH_UNTIL, limit=7)
    assert run(made, b"ab stop it") == ["a", "b", " ", "", "", "", ""]
    assert (made.finish, made.taken) == (FINISH_UNTIL, 7)  # the stop string counts before the limit
    assert (rest(made), made.kept) == ("", 3)
    made = generation("b stop")
    assert run(made, b"ab stop") == ["a", "", "", "", "", "", ""]
    assert (rest(made), made.kept) == ("", 1)


def test_text_held_back_comes_at_the_end() -> None:
    made = generation("stop", held=b"op!")
    assert run(made, b"ast") == ["a", "", ""]
    assert (rest(made), made.kept) == ("", 1)
    assert made.finish is None
    made = generation("stop", held=b"o!")
    run(made, b"ast")
    assert (rest(made), made.kept) == ("sto!", 3)


def test_the_reason_is_there_with_the_last_token() -> None:
    made = generation(limit=2)
    assert [made.finish for _ in made.run(b"abc")] == [None, FINISH_LENGTH]


@pytest.mark.parametrize(
    ("stops", "limit", "finish"), [((), 2, "watched"), (("b",), 2, FINISH_STOP), ((), 9, "watched")]
)
def test_a_watcher_sees_every_token_and_may_end_the_text(
    stops: tuple[str, ...], limit: int, finish: str
) -> None:
    seen: list[int] = []

    def watch(token: int) -> str | None:
        seen.append(token)
        return "watched" if len(seen) == 2 else None

    made = generation(*stops, limit=limit, watch=watch)
    run(made, b"abc")
    assert (seen, made.finish) == (list(b"ab"), finish)
