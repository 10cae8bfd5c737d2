"""JSON schemas as grammars, with bounds: what they repeat becomes a text as long as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from llama_cpp.llama_grammar import JSON_GBNF, json_schema_to_gbnf

from .refusals import RefusedError, wrong_field

# llama.cpp's parser repeats nothing more often.
MOST_REPETITIONS = 2000

_QUANTIFIER = re.compile(r"\{\s*(\d+)?\s*(?:,\s*(\d+)?\s*)?\}")
_SIZES = ("minItems", "maxItems", "minLength", "maxLength")


def schema_grammar(schema: dict[str, Any], param: str) -> str:
    """The grammar of the JSON that a schema allows; any JSON for an empty one.

    Raises:
        RefusedError: llama_cpp cannot make a grammar of it, or only a huge one; `param` is where it
            stood.
    """
    if not schema:
        return str(JSON_GBNF)
    check_sizes(schema, param)
    try:
        return str(json_schema_to_gbnf(json.dumps(schema)))
    except RecursionError:
        raise _misfit(
            "it is nested too deeply, or has too many optional properties", param
        ) from None
    except Exception as error:
        raise _misfit(str(error) or type(error).__name__, param) from error


def check_sizes(schema: dict[str, Any], param: str) -> None:
    """Refuse a schema of which only a huge grammar could be made, with a RefusedError."""
    for name, value in _entries(schema):
        if name in _SIZES:
            if not isinstance(value, int) or not 0 <= value <= MOST_REPETITIONS:
                raise _misfit(f"{name} has to be a number from 0 to {MOST_REPETITIONS}", param)
        elif name == "pattern" and isinstance(value, str):
            counts = [int(count) for pair in _QUANTIFIER.findall(value) for count in pair if count]
            if max(counts, default=0) > MOST_REPETITIONS:
                raise _misfit(f"a pattern repeats more than {MOST_REPETITIONS} times", param)


def _misfit(reason: str, param: str) -> RefusedError:
    return wrong_field(param, f"no grammar for this schema: {reason}")


def _entries(schema: Any) -> Iterator[tuple[str, Any]]:
    """All names and values in a schema, however deep."""
    left = [schema]
    for here in left:
        if isinstance(here, dict):
            yield from here.items()
        if isinstance(here, (dict, list)):
            left += here.values() if isinstance(here, dict) else here
