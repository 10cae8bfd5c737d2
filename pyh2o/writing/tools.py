"""Tools that a model may call, and its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A tool as a model is told of it.

    Attributes:
        name: that it is called by.
        description: what it does.
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it, in OpenAI's words."""
        return {"type": "function", "function": dict(vars(self))}


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: as JSON.
        result: what the model is told; None while the call waits for it.
        failed: whether that says what went wrong.
    """

    name: str
    arguments: str
    result: str | None = None
    failed: bool = False
