"""Decode and validate dataclasses from JSON that a user may have edited."""

from __future__ import annotations

import contextlib
import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


# The range of llama.cpp's integers.
Count = Annotated[int, range(2**31)]
MAX_SHOWN = 60

Scalar = bool | int | float | str | None


def record_of(kind: type[Record], data: object, name: str = "header") -> Record:
    """Return a dataclass from a JSON object with exactly its fields.

    Fields may be bool, int, float, str, other such dataclasses, lists, tuples of any length,
    objects, and unions of these. An integer is accepted as a float. The argument of `Annotated` is
    a range or a tuple of the allowed values.

    Args:
        kind: the dataclass.
        data: the decoded JSON.
        name: name of the record for error messages.

    Raises:
        ValueError: a field is missing, unknown or invalid, or the dataclass rejects it.
    """
    if not isinstance(data, dict):
        raise ValueError(f"its {name} is {_shown(data)}")
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for unknown in data.keys() - known.keys():
        raise ValueError(f"its {name} has an unknown field {_shown(unknown)}")
    for each in known.values():
        if each.name not in data and each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"its {name} has no {each.name}")
    hints = _hints(kind)  # type: ignore[arg-type]  # a type can be hashed
    return kind(**{field: value_of(hints[field], data[field], field) for field in data})


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields; cached, as this is slow and turns are many."""
    return get_type_hints(kind, include_extras=True)


def value_of(hint: Any, value: Any, name: str) -> Any:
    """Return a value of an annotated type from decoded JSON.

    Raises:
        ValueError: it has another type; the message contains `name`.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = value_of(arguments[0], value, name)
        if found in arguments[1]:
            return found
    elif origin in (Union, UnionType):
        for each in arguments:
            with contextlib.suppress(ValueError):
                return value_of(each, value, name)
    elif origin in (list, tuple):
        if isinstance(value, list):
            return origin(value_of(arguments[0], each, name) for each in value)
    elif origin is dict:
        if isinstance(value, dict):
            return {key: value_of(arguments[1], each, str(key)) for key, each in value.items()}
    elif is_dataclass(hint):
        assert isinstance(hint, type)
        return record_of(hint, value, name)
    elif hint is float:
        if type(value) in (int, float) and math.isfinite(value):
            return value
    elif hint is Any or type(value) is hint:
        return value
    raise ValueError(f"its {in_one_line(name)} is {_shown(value)}")


def in_one_line(text: str) -> str:
    """Return a text for an error message: in one line and shortened."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 3]}..."


def _shown(value: object) -> str:
    return in_one_line(ascii(value))
