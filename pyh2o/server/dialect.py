"""Dialects: how the clients of a family of routes want errors and streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .refusals import RefusedError


def data_line(event: Any) -> str:
    """A server-sent event without a name."""
    return f"data: {json.dumps(event)}\n\n"


def named_event(event: Any) -> str:
    """One with the name that it has in its JSON."""
    return f"event: {event.get('type', 'error')}\n{data_line(event)}"


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

    error: Callable[[RefusedError], Any] = lambda refusal: refusal.body()
    line: Callable[[Any], str] = data_line
    end: str = ""
    ping: str = ": still here\n\n"
    media_type: str = "text/event-stream"


OPENAI = Dialect(end="data: [DONE]\n\n")


def dialect_of(scope: Mapping[str, Any]) -> Dialect:
    """That of the route of a request; OpenAI's where there is no route."""
    dialect: Dialect = getattr(scope.get("route"), "dialect", OPENAI)
    return dialect
