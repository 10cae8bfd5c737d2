"""Policies by name, and the parser of texts such as `snap:queries=32,pool=5`, `file.py:Class`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from .base import KINDS, Policy
from .h2o import H2O, H2ODecay, H2OFar, H2OMean, RoCo
from .snap import Snap
from .streaming import Streaming

POLICIES: dict[str, type[Policy]] = {
    "h2o": H2O,
    "h2o-mean": H2OMean,
    "h2o-decay": H2ODecay,
    "h2o-far": H2OFar,
    "roco": RoCo,
    "snap": Snap,
    "streaming": Streaming,
}
for _name, _class in POLICIES.items():
    _class.name = _name

# Policies with a C++ implementation in native/src/policies; others are called at compactions.
NATIVE_POLICIES = (H2O, H2OMean, H2ODecay, H2OFar, Streaming)

# FILE.py:CLASS or FILE.py:CLASS:PARAMETERS
_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)(?P<rest>:.*)?", re.DOTALL)


def parse_policy(text: str | Policy) -> Policy:
    """Return the policy for a text: `name` or `name:parameter=value,parameter=value`.

    The name is one of `POLICIES`, or `file.py:Class`. This is the inverse of `str(policy)`, except
    for classes of modules. A policy is returned as is.
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise SettingsError(f"policy is {text!r}: give a text such as 'snap:queries=32'")
    in_file = _IN_FILE.fullmatch(text.strip())
    if in_file is not None:
        policy = _class_in(Path(in_file["file"]).resolve(), in_file["name"])
        name, colon, assignments = policy.name, in_file["rest"] or "", (in_file["rest"] or "")[1:]
    else:
        name, colon, assignments = (part.strip() for part in text.partition(":"))
        if name not in POLICIES:
            raise SettingsError(
                f"unknown policy {name!r}: give one of {', '.join(POLICIES)}, or FILE.py:CLASS"
            )
        policy = POLICIES[name]
    values: dict[str, Any] = {}
    for assignment in assignments.split(",") if colon else ():
        parameter, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise SettingsError(
                f"{name}: {assignment.strip()!r} is not PARAMETER=VALUE: write {name} or "
                f"{name}:PARAMETER=VALUE"
            )
        if parameter in values:
            raise SettingsError(f"{name}: {parameter} is given twice: give it once")
        values[parameter] = _value(policy, parameter, value)
    return policy(**values)


@functools.cache  # so that equal texts give equal policies
def _class_in(file: Path, name: str) -> type[Policy]:
    found = getattr(_module(file), name, None)
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        raise SettingsError(f"{file} has no class {name} that derives from pyh2o.policies.Policy")
    if inspect.isabstract(found):
        raise SettingsError(f"{file}: {name} has no method score(rows): define one")
    found.name, found.file = f"{file.stem}:{name}", f"{file}:{name}"
    return found


@functools.cache
def _module(file: Path) -> Any:
    # a name that no other module can have
    spec = importlib.util.spec_from_file_location(f"policies in {file}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        if isinstance(error, FileNotFoundError) and error.filename == str(file):
            raise SettingsError(f"no such file {file}: give a policy as FILE.py:CLASS") from None
        raise SettingsError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _value(policy: type[Policy], parameter: str, text: str) -> Any:
    defaults = policy.parameters()
    if parameter not in defaults:
        theirs = f"its parameters are {', '.join(defaults)}" if defaults else "it has none"
        raise SettingsError(f"{policy.name} has no parameter {parameter!r}: {theirs}")
    read, wanted = KINDS[type(defaults[parameter])]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise SettingsError(f"{policy.name}: {parameter} is {text!r}: give {wanted}") from None
