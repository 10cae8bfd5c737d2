"""Policies of all kinds."""

from __future__ import annotations

from pathlib import Path

from pyh2o.policies import POLICIES, H2ODecay, Policy, RoCo, Snap, Streaming, parse_policy

RESEARCH = Path(__file__).parents[2] / "research" / "policies"


def in_research(text: str) -> str:
    """Return a policy of research/policies by its file and class: "keydiff:KeyDiff"."""
    file, colon, name = text.partition(":")
    return f"{RESEARCH / file}.py{colon}{name}"


EXAMPLES = [
    *map(in_research, ("keydiff:KeyDiff", "expected:Expected", "random_rows:RandomRows")),
    *map(in_research, ("one_choice:H2OLayer", "one_choice:H2OCells", "random_rows:NACL")),
]

# Policies with parameters, all changed.
CHANGED: list[Policy] = [
    H2ODecay(half_life=210.5),
    RoCo(guard=0.1),
    Snap(queries=7, pool=3),
    Streaming(sinks=0),
    parse_policy(
        in_research("expected:Expected:queries=9,horizon=64,epsilon=1e-05,covariance=true")
    ),
    parse_policy(in_research(f"random_rows:RandomRows:seed={2**64 - 1}")),
    parse_policy(in_research("random_rows:NACL:queries=5,random=0.25,seed=3")),
]

ALL_KINDS: list[Policy] = [
    *(cls() for cls in POLICIES.values()),
    *map(parse_policy, EXAMPLES),
    *CHANGED,
]
