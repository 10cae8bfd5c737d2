"""What measures and explains pyh2o, and is no part of it: run from a checkout.

* reference: a Llama with eviction, archive and search in NumPy, the oracle of the tests;
* eval: what a cache that evicts loses (`python -m research.eval`);
* speed: speed and memory of many caches, interleaved, other programs' among them
  (`python -m research.speed`);
* benchmarks: programs that each measure one thing (`python -m research.benchmarks.NAME`).

speed and benchmarks share the child processes and interleaved rounds of `pyh2o.bench`.
"""

import sys
from pathlib import Path

# `python -m` looks into the checkout first, whose pyh2o has no compiled library: the installed one
# comes before it.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.sort(key=lambda entry: Path(entry).resolve() == _CHECKOUT)
