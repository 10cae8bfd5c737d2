"""What OpenAI's clients and classes say in other words than llama_cpp and pyh2o."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..writing.finish import FINISH_LENGTH, FINISH_TRAINED_CONTEXT


def as_json_object(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Turn the response format "json_schema" into llama_cpp's "json_object" with a schema.

    OpenAI's clients send the schema as {"type": "json_schema", "json_schema": {"schema": ...}},
    which llama_cpp takes no notice of: the answer would be any text. Other types stay as they are.

    Raises:
        ValueError: the type is "json_schema" and there is no schema.
    """
    if response_format is None or response_format.get("type") != "json_schema":
        return response_format
    schema = (response_format.get("json_schema") or {}).get("schema")
    if schema is None:
        raise ValueError(
            'response_format has the type "json_schema" but no schema: put it at '
            'response_format["json_schema"]["schema"]'
        )
    return {"type": "json_object", "schema": schema}


def in_openai_words(result: dict[str, Any] | Iterator[dict[str, Any]]) -> Any:
    """A result, or the chunks of a stream, with an ending that OpenAI has."""
    if not isinstance(result, dict):
        return map(in_openai_words, result)
    for choice in result["choices"]:
        if choice["finish_reason"] == FINISH_TRAINED_CONTEXT:
            choice["finish_reason"] = FINISH_LENGTH
    return result
