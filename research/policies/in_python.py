r"""Library policies computed in Python, to measure the cost of Python.

    python -m research.benchmarks.upkeep compactions model.gguf \
        --policy h2o,research/policies/in_python.py:H2O
"""

from __future__ import annotations

from pyh2o import policies


class H2O(policies.H2O):
    """A subclass is another policy, which the library does not compute."""


class H2OFar(policies.H2OFar):
    """Like `H2O`."""
