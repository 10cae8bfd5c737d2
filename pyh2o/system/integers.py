"""Checks of whole numbers among arguments: `int`, or NumPy's types."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ..errors import SettingsError

LARGEST_INT32 = 2**31 - 1


def whole_number(name: str, value: Any, cure: str = "give a whole number") -> int:
    """Convert an argument to an `int`, or raise a SettingsError, for example for 1.5 or True."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise SettingsError(f"{name} is {value!r}: {cure}")


def check_count(name: str, value: Any, *, least: int, cure: str, most: float = math.inf) -> int:
    """Convert an argument to an `int`, or raise a SettingsError unless it is in the range."""
    count = whole_number(name, value, cure)
    if not least <= count <= most:
        raise SettingsError(f"{name} is {value!r}: {cure}")
    return count


def convert_integers(record: Any) -> None:
    """Convert the fields of a frozen record that are declared as integers to `int`."""
    for each in fields(record):
        value = getattr(record, each.name)
        if each.type == "int" or (each.type == "int | None" and value is not None):
            object.__setattr__(record, each.name, whole_number(each.name, value))
