"""Policy texts: names and parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from pyh2o.errors import SettingsError
from pyh2o.policies import H2O, POLICIES, H2ODecay, Policy, Snap, parse_policy
from some_policies import ALL_KINDS, CHANGED, in_research

EXPECTED = in_research("expected:Expected")


def test_names_of_policies() -> None:
    assert list(POLICIES) == [
        *("h2o", "h2o-mean", "h2o-decay", "h2o-far", "roco", "snap", "streaming"),
    ]


@pytest.mark.parametrize("policy", ALL_KINDS, ids=str)
def test_a_policy_text_round_trips(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy
    assert ("=" in str(policy)) == (policy in CHANGED)
    assert policy.full_text.count("=") == len(fields(policy))
    assert policy.full_text.startswith(policy.name)
    if not policy.file:
        assert parse_policy(policy.full_text) == policy


def test_a_policy_text_omits_defaults() -> None:
    assert str(H2O()) == "h2o"
    assert str(Snap()) == str(Snap(queries=32, pool=5)) == "snap"
    assert str(Snap(pool=7)) == "snap:pool=7"
    assert str(H2ODecay(half_life=128)) == "h2o-decay:half_life=128"
    assert str(H2ODecay(half_life=210.5)) == "h2o-decay:half_life=210.5"


def test_a_policy_text_may_have_spaces_and_defaults() -> None:
    assert parse_policy(" snap : pool = 5 , queries = 64 ") == Snap(queries=64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"policy '': give one of h2o, h2o-mean, .*, or FILE.py:CLASS"),
        ("H2O", "unknown policy 'H2O'"),
        ("snap:", "snap: '' is not PARAMETER=VALUE"),
        ("snap:pool", "'pool' is not PARAMETER=VALUE: write snap or snap:PARAMETER"),
        ("snap:pool=5,", "snap: '' is not PARAMETER=VALUE"),
        ("snap:size=5", "snap has no parameter 'size': its parameters are queries, pool$"),
        ("h2o:queries=2", "h2o has no parameter 'queries': it has none"),
        ("snap:pool=3,pool=3", "snap: pool is given twice"),
        ("snap:pool=4", "snap: pool is 4: give an odd number from 1"),
        ("snap:pool=-1", "snap: pool is -1"),
        ("snap:pool=5.0", "snap: pool is '5.0': give a whole number"),
        ("snap:queries=0", "snap: queries is 0: give a number from 1"),
        ("snap:queries=many", "queries is 'many': give a whole number"),
        ("roco:guard=1.1", "roco: guard is 1.1: give a number from 0 to 1"),
        ("roco:guard=half", "roco: guard is 'half': give a number$"),
        ("roco:guard=nan", "roco: guard is nan"),
        ("h2o-decay:half_life=0", "half_life is 0.0: give a number above 0"),
        ("h2o-decay:half_life=inf", "half_life is inf: give a number above 0"),
        (
            f"{EXPECTED}:covariance=yes",
            "expected:Expected: covariance is 'yes': give true or false",
        ),
        (f"{EXPECTED}:horizon=0", "horizon is 0"),
        (f"{EXPECTED}:epsilon=-1", "epsilon is -1.0: give a number from 0 to 1"),
        (f"{EXPECTED}:epsilon=1.5", "epsilon is 1.5: give a number from 0 to 1"),
        ("streaming:sinks=-1", "sinks is -1"),
        (3, "policy is 3: give a text"),
    ],
)
def test_an_invalid_policy_text_is_refused_in_one_line(text: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        parse_policy(text)
    assert "\n" not in str(error.value)


def test_values_of_wrong_types_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"snap: pool is 5\.0: give a whole number"):
        Snap(pool=5.0)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="snap: pool is True: give a whole number"):
        Snap(pool=True)
    with pytest.raises(SettingsError, match="expected:Expected: covariance is 1: give true"):
        type(parse_policy(EXPECTED))(covariance=1)  # type: ignore[call-arg]


def test_required_inputs_of_each_policy() -> None:
    """The native code uses the same table to decide what it collects."""
    needs = {name: cls.needs for name, cls in POLICIES.items() if cls.needs != ("attention",)}
    squares, again = ("attention", "squares"), ("query_attention",)
    assert needs == {"roco": squares, "snap": again, "streaming": ()}
    queries = {name: cls().n_queries for name, cls in POLICIES.items() if cls().n_queries}
    assert queries == {"snap": 32}
    half_lives = {name: cls().half_life for name, cls in POLICIES.items() if cls().half_life}
    assert half_lives == {"h2o-decay": 256.0}
    assert [name for name, cls in POLICIES.items() if cls().n_near] == ["h2o-far"]
