"""Seeds of `make fuzz`: states of another version would be refused at their first number."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyh2o.cache.kv_cache import check_state_version

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
FRONT = 2  # bytes that choose what is done with the state


@pytest.mark.parametrize("name", sorted(path.name for path in (CORPUS / "states").iterdir()))
def test_seeds_are_of_this_version(name: str) -> None:
    """Otherwise write them anew: scripts/fuzz.py --seeds."""
    check_state_version((CORPUS / "states" / name).read_bytes()[FRONT:])


def test_seeds_are_few_and_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert 10 < len(sizes) < 100
    assert sum(sizes) < 250_000
