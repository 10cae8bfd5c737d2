"""Seeds of `make fuzz`: states of another version would be refused at their first number."""

from __future__ import annotations

from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
FRONT = 2 + 8  # bytes that choose what is done with the state, and what llama.cpp puts in front
VERSION = 2  # in the last byte of the number that a state begins with (h2o-state.cpp)


@pytest.mark.parametrize("name", sorted(path.name for path in (CORPUS / "states").iterdir()))
def test_seeds_are_of_this_version(name: str) -> None:
    """Otherwise write them anew: scripts/fuzz.py --seeds."""
    assert (CORPUS / "states" / name).read_bytes()[FRONT : FRONT + 2] == bytes([VERSION, 0x68])


def test_seeds_are_few_and_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert 10 < len(sizes) < 100
    assert sum(sizes) < 250_000
