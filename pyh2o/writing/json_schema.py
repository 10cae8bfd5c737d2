"""JSON schemas, written so that llguidance reads more of them.

llguidance refuses keywords that it does not know. Some of these say nothing where they stand, and
others can be said by keywords that it knows; all else is left for it to refuse by name.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

from ..errors import GrammarError

# One space, or a line break with an indentation: small models write white space without end.
WHITE_SPACE = r"( |\n[ \t]{0,20})?"
# Lists of different values out of so many are written down one by one.
MAX_VALUES = 5

_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then",
            "else", "unevaluatedItems", "unevaluatedProperties", "additionalItems")  # fmt: skip
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# The standard's; others are notes of the program that made the schema.
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
# Values, as JSON, with which a keyword allows everything.
_SILENT = {
    "uniqueItems": ("false",),
    "not": ("false",),
    "propertyNames": ("true", "{}", '{"type": "string"}'),
    "unevaluatedItems": ("true", "{}"),
    "unevaluatedProperties": ("true", "{}"),
    "dependentRequired": ("{}",),
    "dependentSchemas": ("{}",),
}
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OF_OBJECTS = {"properties", "required", "additionalProperties", "patternProperties"}
# Keywords beside which it is not known which properties or items have been looked at.
_APPLICATORS = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"}


def for_llguidance(schema: Any, *, is_strict: bool = True) -> str:
    """Return a JSON schema as text for llguidance, with the white space that answers may have.

    Args:
        schema: of draft 2020-12: an object, True or False.
        is_strict: False to ignore keywords that llguidance does not know.

    Raises:
        GrammarError: it allows no value, is nested too deeply, or is not JSON.
    """
    if schema is False:
        raise GrammarError("the schema false allows no value: give another")
    if schema is not True and not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object: give one, such as {}")
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": not is_strict}
    try:
        rewritten = {} if schema is True else _rewritten(schema, schema, not _merges(schema))
        return json.dumps({**rewritten, "x-guidance": options}, allow_nan=False)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply: flatten it") from None
    except (TypeError, ValueError):
        raise GrammarError("the schema is not JSON: give an object of JSON") from None


def _rewritten(schema: Any, root: Any, closes: bool) -> Any:
    """Rewrite a schema and all in it; `closes` says whether objects are closed (see `_close`)."""
    if not isinstance(schema, dict):
        return schema
    result = {name: value for name, value in schema.items() if name != "x-guidance"}
    for name, value in schema.items():
        if name in _SCHEMAS:
            result[name] = _rewritten(value, root, closes)
        elif name in _LISTS_OF_SCHEMAS and isinstance(value, list):
            result[name] = [_rewritten(each, root, closes) for each in value]
        elif name in _NAMED_SCHEMAS and isinstance(value, dict):
            result[name] = {key: _rewritten(each, root, closes) for key, each in value.items()}
        elif name in _COUNTS and isinstance(value, float) and value.is_integer():
            result[name] = int(value)
    _drop_what_says_nothing(result)
    for name, rewrite in _REWRITES.items():
        if name in result:
            rewrite(result, root)
    if closes:
        _close(result)
    return result


def _merges(schema: Any) -> bool:
    """Whether somewhere several schemas say which properties one object has."""
    if isinstance(schema, list):
        return any(map(_merges, schema))
    if not isinstance(schema, dict):
        return False
    is_merged = "allOf" in schema or (schema.keys() & _APPLICATORS and schema.keys() & _OF_OBJECTS)
    return bool(is_merged) or any(map(_merges, schema.values()))


def _close(schema: dict[str, Any]) -> None:
    """Let an object have the properties that are listed, and no others unless these are allowed.

    Otherwise small models add properties without end.
    """
    listed, required = schema.get("properties"), schema.get("required", [])
    is_open = schema.keys() & {"additionalProperties", "patternProperties", "minProperties"}
    if isinstance(listed, dict) and not is_open and {*required} <= listed.keys():
        schema["additionalProperties"] = False


def _drop_what_says_nothing(schema: dict[str, Any]) -> None:
    if schema.get("format", "date") not in _FORMATS:
        del schema["format"]
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    if "contains" not in schema:
        for name in ("minContains", "maxContains"):
            schema.pop(name, None)
    for name, values in _SILENT.items():
        if name in schema and json.dumps(schema[name]) in values:
            del schema[name]


# ---------------------------------------------------------------------------------------------
# Keywords that others can stand for
# ---------------------------------------------------------------------------------------------


def _without_unevaluated(kind: str, others: set[str]) -> Callable[[dict[str, Any], Any], None]:
    """Without keywords that look at properties or items, what they leave is what is not listed."""

    def rewrite(schema: dict[str, Any], _root: Any) -> None:
        name = f"unevaluated{kind.title()}"
        if not schema.keys() & (_APPLICATORS | others):
            rest = schema.pop(name)
            schema.setdefault("items" if kind == "items" else "additionalProperties", rest)

    return rewrite


def _named_properties(schema: dict[str, Any], _root: Any) -> None:
    """Say by `patternProperties` or `properties` what names are like."""
    names = schema["propertyNames"]
    if schema.keys() & {"properties", "patternProperties"} or not isinstance(names, dict):
        return
    said = {**names, "type": "string"}.keys() - {"type", "title", "description"}
    value = schema.get("additionalProperties", {})
    if said == {"enum"} or said == {"const"}:
        listed = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
        schema["properties"] = dict.fromkeys(listed, value)
    elif said == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: value}
    elif said <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        schema["patternProperties"] = {rf"^[\s\S]{{{least},{most}}}$": value}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _listed_items(schema: dict[str, Any], root: Any) -> None:
    """Write down all lists of different values, where they are few."""
    items = schema.get("items")
    reference = items.get("$ref", "") if isinstance(items, dict) else ""
    if reference.startswith("#/$defs/"):
        items = root.get("$defs", {}).get(reference.removeprefix("#/$defs/"))
    if not isinstance(items, dict) or not items.keys() <= {"enum", "type", "title", "description"}:
        return
    values = [None] if items.get("type") == "null" else [False, True]
    values = items.get("enum", values if items.get("type") in ("boolean", "null") else [])
    is_simple = all(isinstance(value, str) for value in values) or "enum" not in items
    if 0 < len(values) <= MAX_VALUES and is_simple and "prefixItems" not in schema:
        least, most = schema.get("minItems", 0), min(schema.get("maxItems", math.inf), len(values))
        lists = [
            [*each] for n in range(least, most + 1) for each in itertools.permutations(values, n)
        ]
        for name in ("uniqueItems", "items", "minItems", "maxItems", "type"):
            schema.pop(name, None)
        schema["enum"] = lists


def _other_types(schema: dict[str, Any], _root: Any) -> None:
    """Name the types that are left; no number where whole numbers are excluded."""
    excluded = schema["not"]
    if isinstance(excluded, dict) and excluded.keys() == {"type"}:
        types = excluded["type"] if isinstance(excluded["type"], list) else [excluded["type"]]
        types = ["number" if name == "integer" else name for name in types]
        given = schema.get("type", [*_TYPES])
        given = given if isinstance(given, list) else [given]
        left = [name for name in given if name.replace("integer", "number") not in types]
        if left:
            schema["type"] = left
            del schema["not"]


_REWRITES: dict[str, Callable[[dict[str, Any], Any], None]] = {
    "unevaluatedProperties": _without_unevaluated("properties", set()),
    "unevaluatedItems": _without_unevaluated("items", {"contains"}),
    "propertyNames": _named_properties,
    "uniqueItems": _listed_items,
    "not": _other_types,
}
