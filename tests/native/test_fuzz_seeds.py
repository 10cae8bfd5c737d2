"""Seeds of `make fuzz`: the library refuses states of another version immediately."""

from __future__ import annotations

from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
FRONT = 2 + 8  # bytes that choose what is done with the state, and bytes that llama.cpp puts first
VERSION = 2  # last byte of the number that a state starts with (h2o-state.cpp)


@pytest.mark.parametrize("name", sorted(path.name for path in (CORPUS / "states").iterdir()))
def test_seeds_have_the_current_version(name: str) -> None:
    """Otherwise write them again: scripts/fuzz.py --seeds."""
    assert (CORPUS / "states" / name).read_bytes()[FRONT : FRONT + 2] == bytes([VERSION, 0x68])


def test_seeds_are_few_and_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert 10 < len(sizes) < 100
    assert sum(sizes) < 250_000
