"""Dialects: how the clients of a family of routes want errors and streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


def data_line(event: Any) -> str:
    """A server-sent event without a name."""
    return f"data: {json.dumps(event)}\n\n"


def named_event(event: Any) -> str:
    """One with the name that it has in its JSON."""
    return f"event: {event.get('type', 'error')}\n{data_line(event)}"


class Refusal(Protocol):
    """A `RefusedError`, as far as a dialect writes it."""

    status: int
    message: str

    def body(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Dialect:
    """How a family of routes writes errors and streams.

    Attributes:
        error: the JSON of a refusal, also of one amid a stream.
        line: an event of a stream as it goes over the wire.
        end: what comes behind the last one.
        ping: what clients skip.
        media_type: of a stream.
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
    """The dialect of a request's route, or of its path if there is no such route."""
    usual = OLLAMA if scope["path"].startswith("/api/") else OPENAI
    dialect: Dialect = getattr(scope.get("route"), "dialect", usual)
    return dialect
