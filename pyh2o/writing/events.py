"""The events of an answer, which every adapter converts to its own output."""

from __future__ import annotations

from dataclasses import dataclass

from .logprobs import TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer.

    Attributes:
        prompt: tokens of the prompt, without dropped ones.
        cached: prompt tokens found in the cache.
        dropped: cached tokens of messages that the client has dropped from its prompt.
    """

    prompt: int = 0
    cached: int = 0
    dropped: int = 0
    sampled: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.dropped + other.dropped,
            self.sampled + other.sampled,
        )


@dataclass(frozen=True)
class Started:
    """The first event, before the prompt is read."""

    usage: Usage


@dataclass(frozen=True)
class Content:
    """The next part of the text, empty for a token without text."""

    text: str = ""
    sampled: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """The next part of the reasoning; for the other attributes see `Content`."""

    text: str
    sampled: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """The start of a tool call, or the next part of its arguments.

    Attributes:
        index: number of the call in the answer, from 0.
        id, name: at the start of a call; "" later.
        arguments: the next part of the JSON.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    sampled: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Done:
    """The last event of an answer, with the stop string of the request that ended it."""

    reason: str
    usage: Usage
    stop: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


Event = Started | Content | Reasoning | ToolCall | Done
