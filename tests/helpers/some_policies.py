"""Policies of all kinds."""

from __future__ import annotations

from pyh2o.policies import (
    NACL,
    POLICIES,
    Expected,
    H2ODecay,
    Policy,
    RandomRows,
    RoCo,
    Snap,
    Streaming,
)

# Some of those that have parameters, with all of them changed.
CHANGED: list[Policy] = [
    H2ODecay(half_life=210.5),
    RoCo(guard=0.1),
    Snap(queries=7, pool=3),
    NACL(queries=5, random=0.25, seed=3),
    Expected(queries=9, horizon=64, epsilon=1e-05, covariance=True),
    Streaming(sinks=0),
    RandomRows(seed=2**64 - 1),
]

ALL_KINDS: list[Policy] = [*(cls() for cls in POLICIES.values()), *CHANGED]
