"""Measurements and explanations of pyh2o, not part of the package: run them from a checkout.

* reference: a Llama with eviction, archive and search in NumPy, the oracle of the tests;
* eval: quality loss of a cache with eviction (`python -m research.eval`);
* speed: speed and memory of many caches, including other programs', interleaved (`python -m
  research.speed`);
* benchmarks: programs that each measure one thing (`python -m research.benchmarks.NAME`).

speed and benchmarks share the child processes and interleaved rounds of `pyh2o.bench`.
"""

import sys
from pathlib import Path

# `python -m` looks into the checkout first, whose pyh2o has no compiled library, so the installed
# one is put before it.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.sort(key=lambda entry: Path(entry).resolve() == _CHECKOUT)
