r"""Policies of the library, asked in Python all the same: what a policy in Python costs.

    python -m research.benchmarks.upkeep compactions model.gguf \
        --policy h2o,research/policies/in_python.py:H2O
"""

from __future__ import annotations

from pyh2o import policies


class H2O(policies.H2O):
    """A subclass is another policy, which no library computes."""


class H2OFar(policies.H2OFar):
    """Likewise."""
