"""Rewrites JSON schemas so that llguidance accepts more of them.

llguidance rejects keywords that it does not support. Those without effect are removed, some are
rewritten by supported keywords, and llguidance reports the others by name.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

from ..errors import GrammarError

# One space, or a line break with indentation: small models would write white space forever.
WHITE_SPACE = r"( |\n[ \t]{0,20})?"
# "uniqueItems" is rewritten as a list of all possible arrays for at most this many values.
MAX_VALUES = 5

_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then",
            "else", "unevaluatedItems", "unevaluatedProperties", "additionalItems")  # fmt: skip
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Formats of the standard; other values are annotations.
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
# Values, as JSON, with which a keyword has no effect.
_NO_EFFECT = {
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
# Keywords that make "unevaluated" properties and items depend on other schemas.
_APPLICATORS = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"}


def for_llguidance(schema: Any, *, is_strict: bool = True) -> str:
    """Return a JSON schema (draft 2020-12) as text for llguidance, with options for white space."""
    if schema is False:
        raise GrammarError("the schema false allows no value: use another schema")
    if schema is not True and not isinstance(schema, dict):
        raise GrammarError("a JSON schema must be an object, such as {}")
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": not is_strict}
    try:
        rewritten = {} if schema is True else _rewritten(schema, schema, not _merges(schema))
        return json.dumps({**rewritten, "x-guidance": options}, allow_nan=False)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply: flatten it") from None
    except (TypeError, ValueError):
        raise GrammarError("the schema is not valid JSON") from None


def _rewritten(schema: Any, root: Any, closes: bool) -> Any:
    """Rewrite a schema and its subschemas; `closes`: close objects (see `_close`)."""
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
    _drop_without_effect(result)
    for name, rewrite in _REWRITES.items():
        if name in result:
            rewrite(result, root)
    if closes:
        _close(result)
    return result


def _merges(schema: Any) -> bool:
    """Whether several schemas anywhere define the properties of the same object."""
    if isinstance(schema, list):
        return any(map(_merges, schema))
    if not isinstance(schema, dict):
        return False
    is_merged = "allOf" in schema or (schema.keys() & _APPLICATORS and schema.keys() & _OF_OBJECTS)
    return bool(is_merged) or any(map(_merges, schema.values()))


def _close(schema: dict[str, Any]) -> None:
    """Disallow properties that are not listed, unless the schema mentions them.

    Otherwise small models would add properties forever.
    """
    listed, required = schema.get("properties"), schema.get("required", [])
    is_open = schema.keys() & {"additionalProperties", "patternProperties", "minProperties"}
    if isinstance(listed, dict) and not is_open and {*required} <= listed.keys():
        schema["additionalProperties"] = False


def _drop_without_effect(schema: dict[str, Any]) -> None:
    if schema.get("format", "date") not in _FORMATS:
        del schema["format"]
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    if "contains" not in schema:
        for name in ("minContains", "maxContains"):
            schema.pop(name, None)
    for name, values in _NO_EFFECT.items():
        if name in schema and json.dumps(schema[name]) in values:
            del schema[name]


# ---------------------------------------------------------------------------------------------
# Keywords that can be rewritten
# ---------------------------------------------------------------------------------------------


def _unevaluated(kind: str, others: set[str]) -> Callable[[dict[str, Any], Any], None]:
    """Rewrite "unevaluated" as the keyword for the rest, if no applicator is present."""

    def rewrite(schema: dict[str, Any], _root: Any) -> None:
        name = f"unevaluated{kind.title()}"
        if not schema.keys() & (_APPLICATORS | others):
            rest = schema.pop(name)
            schema.setdefault("items" if kind == "items" else "additionalProperties", rest)

    return rewrite


def _named_properties(schema: dict[str, Any], _root: Any) -> None:
    """Rewrite `propertyNames` as `patternProperties` or `properties`."""
    names = schema["propertyNames"]
    if schema.keys() & {"properties", "patternProperties"} or not isinstance(names, dict):
        return
    keywords = {**names, "type": "string"}.keys() - {"type", "title", "description"}
    value = schema.get("additionalProperties", {})
    if keywords == {"enum"} or keywords == {"const"}:
        listed = [name for name in names.get("enum", [names.get("const")]) if isinstance(name, str)]
        schema["properties"] = dict.fromkeys(listed, value)
    elif keywords == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: value}
    elif keywords <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        schema["patternProperties"] = {rf"^[\s\S]{{{least},{most}}}$": value}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _listed_items(schema: dict[str, Any], root: Any) -> None:
    """Rewrite `uniqueItems` as an enumeration of all arrays, if there are few."""
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
    """Rewrite `not` with types as the remaining types; "integer" also excludes "number"."""
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
    "unevaluatedProperties": _unevaluated("properties", set()),
    "unevaluatedItems": _unevaluated("items", {"contains"}),
    "propertyNames": _named_properties,
    "uniqueItems": _listed_items,
    "not": _other_types,
}
