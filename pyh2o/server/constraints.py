"""What an answer has to follow, in the fields of llama.cpp's, OpenAI's and vLLM's clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..errors import GrammarError
from ..writing.grammar import Grammar

# Fields of which a request may have one: those that are a schema, and others.
SCHEMAS = ("response_format", "json_schema", "guided_json")
CONSTRAINTS = (*SCHEMAS, "grammar", "guided_grammar", "guided_regex", "guided_choice")
# vLLM's newer names of them.
STRUCTURED = {name: f"guided_{name}" for name in ("json", "regex", "choice", "grammar")}


def wanted_schema(response_format: object) -> Any:
    """The schema that a response format has; None for any text.

    Raises:
        ValueError: it is none.
    """
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object", **others}:
            return others.get("schema") or {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return schema
    raise ValueError(
        'give the type "text", "json_object" or, with {"schema": ...} in "json_schema", '
        '"json_schema"'
    )


def named_as_vllm_does(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body, with those in vLLM's `structured_outputs` by their older names.

    Raises:
        ValueError: it has others.
    """
    left = dict(fields)
    given = left.pop("structured_outputs", None) or {}
    given = {name: value for name, value in given.items() if value not in (None, False)}
    if given.pop("json_object", None):
        given["json"] = {"type": "object"}
    for name, value in given.items():
        if name not in STRUCTURED:
            raise ValueError(
                f"structured_outputs.{name[:40]} is not supported: give json, regex, choice or "
                "grammar"
            )
        left[STRUCTURED[name]] = value
    return left


def read_json(schema: object) -> object:
    """A schema, which some clients send as text."""
    if isinstance(schema, str):
        with suppress(ValueError):
            return json.loads(schema)
    return schema


def grammar_of_field(name: str, value: Any) -> Grammar:
    """What a field says, as a grammar.

    Raises:
        GrammarError: no text can be held to it.
    """
    if name in SCHEMAS:
        return Grammar.of_schema(value, name)
    if name == "guided_regex":
        return Grammar.of_regex(value, name)
    if name == "guided_choice":
        return Grammar.of_choice(value, name)
    return Grammar.of(value, name)


def checked(name: str, value: Any) -> Any:
    """The value of a field, if it can be read.

    Raises:
        ValueError: it cannot.
    """
    try:
        if value not in (None, ""):
            grammar_of_field(name, value)
    except GrammarError as error:
        raise ValueError(error.reason) from None
    return value
