"""Records from JSON that somebody may have edited: each value has to be what its field says."""

from __future__ import annotations

import contextlib
import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


# More than any text has, and as much as fits the integers of llama.cpp.
Count = Annotated[int, range(2**31)]
LONGEST_SHOWN = 60

Scalar = bool | int | float | str | None


def record_of(kind: type[Record], data: object, name: str = "header") -> Record:
    """A dataclass from a JSON object that has its fields and no others.

    Fields may be bool, int, float, str, other such dataclasses, lists, tuples of any length,
    objects, and unions of these. A whole number is a float, too. What stands beside a type in
    `Annotated` has the values that there may be: a range, a tuple of words.

    Args:
        kind: the dataclass.
        data: what JSON had.
        name: of the record, for the message.

    Raises:
        ValueError: a field is missing, unknown or something else, or the dataclass refuses it.
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
    """Of the fields of a dataclass; finding them takes long, and a session has many turns."""
    return get_type_hints(kind, include_extras=True)


def value_of(hint: Any, value: Any, name: str) -> Any:
    """A value of an annotated type from what JSON had.

    Raises:
        ValueError: it is something else; `name` is in the message.
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
    """A text of a file in a message: one line, not too long."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_SHOWN else f"{line[: LONGEST_SHOWN - 3]}..."


def _shown(value: object) -> str:
    return in_one_line(ascii(value))
