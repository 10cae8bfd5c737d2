"""The events that an answer consists of: what every adapter turns into its own output."""

from __future__ import annotations

from dataclasses import dataclass

from .logprobs import TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer.

    Attributes:
        prompt: tokens of the prompt, without dropped ones.
        cached: those of them that were in the cache.
        dropped: tokens of the text that the client has left out of its prompt.
        sampled: tokens of the answer so far.
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
    """The first event, before the prompt is read.

    Attributes:
        usage: of the prompt.
    """

    usage: Usage


@dataclass(frozen=True)
class Content:
    """The next part of the text, empty for a token without text.

    Attributes:
        sampled: tokens of the answer so far.
        logprobs: of the tokens since the event before, if they were asked for.
    """

    text: str = ""
    sampled: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """The next part of the reasoning; otherwise as `Content`."""

    text: str
    sampled: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """The beginning of a tool call, or the next part of its arguments; otherwise as `Content`.

    Attributes:
        index: of the call in the answer, from 0.
        id, name: of a call that begins; "" otherwise.
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
    """The end of an answer, always the last event.

    Attributes:
        reason: one of `finish`.
        usage: of the whole answer.
        stop: the stop string of the request that ended the text; None if none did.
        logprobs: as in `Content`.
    """

    reason: str
    usage: Usage
    stop: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


Event = Started | Content | Reasoning | ToolCall | Done
