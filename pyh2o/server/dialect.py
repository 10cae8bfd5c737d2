"""Formats of errors and streams in the APIs that the server speaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


def data_line(event: Any) -> str:
    return f"data: {json.dumps(event)}\n\n"


def named_event(event: Any) -> str:
    """Return a server-sent event whose name is the JSON's type."""
    return f"event: {event.get('type', 'error')}\n{data_line(event)}"


class Refusal(Protocol):
    """A `RefusedError`, as far as a dialect writes it."""

    status: int
    message: str

    def body(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Dialect:
    """Format of errors and streams.

    Attributes:
        error: returns the JSON of an error, also within a stream.
        line: returns the text of an event.
        ping: text that clients skip.
    """

    error: Callable[[Refusal], Any] = lambda refusal: refusal.body()
    line: Callable[[Any], str] = data_line
    end: str = ""
    ping: str = ": still here\n\n"
    media_type: str = "text/event-stream"


OPENAI = Dialect(end="data: [DONE]\n\n")
OLLAMA = Dialect(
    error=lambda refusal: {"error": refusal.body()["error"]["message"]},
    line=lambda event: json.dumps(event) + "\n",
    ping="",
    media_type="application/x-ndjson",
)


def dialect_of(scope: Mapping[str, Any]) -> Dialect:
    """Return the dialect of a request's route, or one by its path if there is no such route."""
    usual = OLLAMA if scope["path"].startswith("/api/") else OPENAI
    dialect: Dialect = getattr(scope.get("route"), "dialect", usual)
    return dialect
