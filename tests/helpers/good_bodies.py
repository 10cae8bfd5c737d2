"""Valid request bodies, which tests damage."""

from __future__ import annotations

from typing import Any

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "once", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 3},
    EMBEDDINGS: {"input": "once"},
}
TOOL = {"type": "function", "function": {"name": "set_flag", "parameters": {"type": "object"}}}
FLAG_SCHEMA = {
    "title": "set_flag",
    "description": "Sets the flag.",
    "type": "object",
    "properties": {"flag": {"type": "boolean"}},
    "required": ["flag"],
    "additionalProperties": False,
}


def with_field(route: str, **fields: Any) -> dict[str, Any]:
    """Return the valid body of a route with other fields."""
    return {**GOOD[route], **fields}
