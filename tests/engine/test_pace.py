"""How many tokens are read beside texts that are written."""

from __future__ import annotations

import numpy as np
import pytest

from pyh2o.core.batcher import FIRST_CHUNK, LONGEST_PAUSE, Pace, next_chunk

READ_SECONDS = 0.004


def seconds_of(n_written: int, n_read: int) -> float:
    return 0.010 + 0.006 * n_written + READ_SECONDS * n_read


@pytest.mark.parametrize("n_written", [1, 3, 8, 32])
def test_a_piece_makes_a_batch_no_longer_than_it_may(n_written: int) -> None:
    pace = Pace(most=512)
    assert pace.chunk(n_written) == FIRST_CHUNK
    for _ in range(30):
        pace.record(n_written, 0, seconds_of(n_written, 0))
        n = pace.chunk(n_written)
        pace.record(n_written, n, seconds_of(n_written, n))
    allowed = LONGEST_PAUSE * seconds_of(n_written, 0)
    n = pace.chunk(n_written)
    assert seconds_of(n_written, n) <= allowed < seconds_of(n_written, n + 2)


def test_what_is_known_of_other_batches_is_used_with_care() -> None:
    pace = Pace(most=512)
    pace.record(8, 0, seconds_of(8, 0))
    pace.record(8, 16, seconds_of(8, 16))
    for n_written in (1, 4, 8, 12):
        n = pace.chunk(n_written)
        assert seconds_of(n_written, n) <= LONGEST_PAUSE * seconds_of(n_written, 0)


def test_a_piece_has_a_token_at_least_and_no_more_than_allowed() -> None:
    slow, fast = Pace(most=64), Pace(most=64)
    for pace, each in ((slow, 10.0), (fast, 1e-6)):
        pace.record(1, 0, 0.01)
        pace.record(1, 10, 0.01 + 10 * each)
    assert (slow.chunk(1), fast.chunk(1)) == (1, 64)
    assert Pace(most=5).chunk(3) == 5


def test_reading_alone_teaches_nothing() -> None:
    pace = Pace(most=64)
    pace.record(0, 512, 2.0)
    assert pace.chunk(1) == FIRST_CHUNK


def test_pieces_are_no_shorter_than_kernels_for_few_queries_take(rng: np.random.Generator) -> None:
    for _ in range(1000):
        n_left, room = (int(n) for n in rng.integers(1, 600, 2))
        least, group = int(rng.integers(1, 18)), int(rng.choice([1, 4, 21, 64]))
        sizes = []
        n_all = n_left
        while n_left > 0:
            sizes.append(next_chunk(n_left, room, least, group))
            n_left -= sizes[-1]
        assert sum(sizes) == n_all
        assert min(sizes) >= least or len(sizes) == 1
        assert max(sizes) < max(room, 2 * least) + group + least
        assert all(size % group == 0 for size in sizes[:-1])
