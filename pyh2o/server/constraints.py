"""Constraints on answers: the fields of OpenAI's, llama.cpp's and vLLM's APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import GrammarError
from ..writing.grammar import Grammar

# A request may have one of these fields. The first three have a JSON schema.
SCHEMAS = ("response_format", "json_schema", "guided_json")
CONSTRAINTS = (*SCHEMAS, "grammar", "guided_grammar", "guided_regex", "guided_choice")
# vLLM's newer names.
STRUCTURED = {name: f"guided_{name}" for name in ("json", "regex", "choice", "grammar")}


def wanted_schema(response_format: object) -> Any:
    """Return the JSON schema of a response format; None for any text."""
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object", **others}:
            return others.get("schema") or {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return schema
    raise ValueError(
        'expected the type "text", "json_object", or "json_schema" with '
        '{"json_schema": {"schema": ...}}'
    )


def without_structured_outputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body with vLLM's `structured_outputs` under their older names."""
    left = dict(fields)
    given = left.pop("structured_outputs", None) or {}
    given = {name: value for name, value in given.items() if value not in (None, False)}
    if given.pop("json_object", None):
        given["json"] = {"type": "object"}
    for name, value in given.items():
        if name not in STRUCTURED:
            raise ValueError(
                f"structured_outputs.{name[:40]} is not supported: use json, regex, choice or "
                "grammar"
            )
        left[STRUCTURED[name]] = value
    return left


def read_json(schema: object) -> object:
    """Parse a JSON schema, which some clients send as a string."""
    if isinstance(schema, str):
        with suppress(ValueError):
            return json.loads(schema)
    return schema


def grammar_of_field(name: str, value: Any) -> Grammar:
    if name in SCHEMAS:
        return Grammar.of_schema(value, name)
    if name == "guided_regex":
        return Grammar.of_regex(value, name)
    if name == "guided_choice":
        return Grammar.of_choice(value, name)
    return Grammar.of(value, name)


def checked(name: str, value: Any) -> Any:
    """Return the value of a field of `CONSTRAINTS`; raise a ValueError if it has no grammar."""
    try:
        if value not in (None, ""):
            grammar_of_field(name, value)
    except GrammarError as error:
        raise ValueError(error.reason) from None
    return value
