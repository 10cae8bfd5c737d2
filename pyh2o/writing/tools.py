"""Tools that a model may call, and its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A tool that a model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """Return the tool as in OpenAI's API."""
        return {"type": "function", "function": dict(vars(self))}


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        name: name of the tool.
        arguments: the arguments as JSON.
        result: text for the model; None while the call waits for it.
        failed: whether the result is an error message.
    """

    name: str
    arguments: str
    result: str | None = None
    failed: bool = False
