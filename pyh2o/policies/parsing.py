"""All policies by name, and reading one from text such as `snap:queries=32,pool=5`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..errors import SettingsError
from .base import Policy
from .expected import Expected
from .h2o import H2O, H2OCells, H2OLayer
from .h2o_decay import H2ODecay
from .h2o_far import H2OFar
from .h2o_mean import H2OMean
from .keydiff import KeyDiff
from .nacl import NACL
from .random_rows import RandomRows
from .roco import RoCo
from .snap import Snap
from .streaming import Streaming
from .tova import TOVA

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        H2O,
        H2OMean,
        H2ODecay,
        H2OFar,
        H2OLayer,
        H2OCells,
        RoCo,
        TOVA,
        Snap,
        NACL,
        KeyDiff,
        Expected,
        Streaming,
        RandomRows,
    )
}


def parse_policy(text: str | Policy) -> Policy:
    """The policy that a text names: `name` or `name:parameter=value,parameter=value`.

    It is the inverse of `str(policy)`. A policy stands for itself.

    Raises:
        SettingsError: there is no such policy or parameter, or a value is out of its limits.
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise SettingsError(f"policy is {text!r}: give a text such as 'snap:queries=32'")
    name, colon, assignments = (part.strip() for part in text.partition(":"))
    if name not in POLICIES:
        raise SettingsError(f"there is no policy {name!r}: give one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    values: dict[str, Any] = {}
    for assignment in assignments.split(",") if colon else ():
        parameter, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise SettingsError(
                f"{name}: {assignment.strip()!r} does not say which parameter is what: write it as "
                f"{name}:PARAMETER=VALUE, without the colon where there is none"
            )
        if parameter in values:
            raise SettingsError(f"{name}: {parameter} is given twice: give it once")
        values[parameter] = _value(policy, parameter, value)
    return policy(**values)


def _value(policy: type[Policy], parameter: str, text: str) -> Any:
    defaults = {item.name: item.default for item in fields(policy)}
    if parameter not in defaults:
        theirs = f"its parameters are {', '.join(defaults)}" if defaults else "it has none"
        raise SettingsError(f"{policy.name} has no parameter {parameter!r}: {theirs}")
    read, wanted = _READERS[type(defaults[parameter])]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise SettingsError(f"{policy.name}: {parameter} is {text!r}: give {wanted}") from None


_READERS: dict[type, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
}
