"""The repetition guard: what is a loop, what is forbidden after it, and when there is no hope."""

from __future__ import annotations

import numpy as np
import pytest

from pyh2o.writing.repetition import (
    ENDLESS_COPIES,
    ENDLESS_MATCHES,
    MANY_LOOPS,
    MAX_COPIED,
    MAX_PERIOD,
    MIN_COPIES,
    MIN_MATCHES,
    STRICT_TOKENS,
    EndlessText,
    RepetitionGuard,
)

# So many that none comes twice by chance.
N_VOCAB = 2**40


def words(rng: np.random.Generator, count: int) -> list[int]:
    """Tokens that are no loop."""
    return rng.integers(0, N_VOCAB, count).tolist()


def loops(guard: RepetitionGuard, tokens: list[int]) -> int:
    """How many are noticed in these tokens."""
    before = guard.loops
    for token in tokens:
        guard.add(token)
    return guard.loops - before


def forbidden_by_definition(text: list[int]) -> list[int]:
    """Tokens that come after an earlier place with the same `MAX_COPIED` tokens before it."""
    ends = range(max(MAX_COPIED, len(text) - MAX_PERIOD), len(text))
    tail = text[-MAX_COPIED:]
    return sorted({text[end] for end in ends if text[end - MAX_COPIED : end] == tail})


@pytest.mark.parametrize("period", [1, 2, 7, 24, 25, 100, MAX_PERIOD])
def test_a_loop_is_noticed_when_it_has_come_often_enough(
    period: int, rng: np.random.Generator
) -> None:
    before, block = words(rng, 600), words(rng, period)
    needed = max(MIN_MATCHES, MIN_COPIES * period)
    guard = RepetitionGuard()
    assert loops(guard, before) == 0
    *almost, last = (block * (needed // period + 2))[: period + needed]
    assert loops(guard, almost) == 0
    assert guard.forbidden == []
    assert loops(guard, [last]) == 1
    assert guard.forbidden == [block[needed % period]]


def test_a_block_too_long_to_be_seen_is_no_loop(rng: np.random.Generator) -> None:
    assert loops(RepetitionGuard(), words(rng, MAX_PERIOD + 1) * 6) == 0


def test_a_refrain_is_no_loop(rng: np.random.Generator) -> None:
    refrain, guard = words(rng, 40), RepetitionGuard()
    for _ in range(20):
        assert loops(guard, words(rng, 60) + refrain) == 0


def test_after_a_loop_long_copies_are_forbidden_for_a_while(rng: np.random.Generator) -> None:
    """Against the definition, over a text that returns to its loop when it may."""
    block, guard = words(rng, 12), RepetitionGuard()
    text = block * 6
    assert loops(guard, text) == 1
    noticed = 12 + MIN_MATCHES
    acted = 0
    for step in range(len(text), noticed + STRICT_TOKENS):
        assert guard.forbidden == forbidden_by_definition(text)
        token = block[step % 12]
        if token in guard.forbidden or rng.random() < 0.02:
            acted += token in guard.forbidden
            token = int(rng.integers(N_VOCAB))
        text.append(token)
        assert loops(guard, [token]) == 0
    assert acted > 5
    assert guard.forbidden == []
    assert loops(guard, block * 6) == 1


def test_a_prompt_that_is_a_loop_may_not_go_on_but_does_not_count(
    rng: np.random.Generator,
) -> None:
    block = words(rng, 20)
    guard = RepetitionGuard(words(rng, 3000) + block * 10)
    assert (guard.loops, guard.forbidden) == (0, [])
    assert loops(guard, [block[0]]) == 1
    assert guard.forbidden == [block[1]]


@pytest.mark.parametrize(("words_between", "hopeless"), [(600, True), (1300, False)])
def test_loop_after_loop_is_hopeless(
    words_between: int, hopeless: bool, rng: np.random.Generator
) -> None:
    guard = RepetitionGuard()
    for number in range(1, MANY_LOOPS + 1):
        assert loops(guard, words(rng, 5) * 15) == 1
        assert guard.hopeless == (hopeless and number == MANY_LOOPS)
        loops(guard, words(rng, words_between))
    assert guard.loops == MANY_LOOPS


def ends(text: EndlessText, tokens: list[int]) -> list[int]:
    """How many of the tokens were there each time that the text should have ended."""
    return [n for n, token in enumerate(tokens, start=1) if text.add(token)]


@pytest.mark.parametrize("period", [1, 2, 7, 63, 64, 65, 100, MAX_PERIOD])
def test_a_text_that_only_repeats_itself_ends_and_may_go_on_for_a_while(
    period: int, rng: np.random.Generator
) -> None:
    start, block = words(rng, 700), words(rng, period)
    matches = max(ENDLESS_MATCHES, -(-ENDLESS_COPIES * period // ENDLESS_MATCHES) * ENDLESS_MATCHES)
    first = len(start) + period + matches
    tokens = [*start, *(block * (3 * ENDLESS_MATCHES + MAX_PERIOD * ENDLESS_COPIES))][: first + 600]
    assert ends(EndlessText(), tokens) == [first, first + 256, first + 512]
    for seen in (first, len(start) + period + 100):
        [again, *_] = ends(EndlessText(tokens[:seen]), tokens[seen:])
        assert seen + again == (first if seen < first else first + ENDLESS_MATCHES)


def test_a_text_that_says_something_does_not_end(rng: np.random.Generator) -> None:
    text, block = EndlessText(), words(rng, 40)
    for _ in range(20):  # a list whose lines are alike, and a table with empty cells
        assert not ends(text, [*words(rng, 3), *block])
    assert not ends(text, words(rng, 1) * ENDLESS_MATCHES)
    assert not ends(text, words(rng, 1000))
