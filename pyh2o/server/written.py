"""Answers in other dialects: events of an answer grouped into blocks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError

from ..writing.chat_parser import Part
from ..writing.events import Done, Reasoning, Started, ToolCall, Usage
from ..writing.logprobs import TokenLogprobs
from .answers import EventAnswer, Events, JsonAnswer, models_of
from .bodies import ChatBody, CompletionBody, Strict
from .refusals import field_refusal
from .served_model import ServedModel

AnyBody = TypeVar("AnyBody", bound=Strict)


@dataclass
class Block:
    """A part of an answer of one kind.

    Attributes:
        kind: "content", "reasoning", or "call" of a tool.
        id, name: of a call.
        text: text so far, or arguments of a call.
    """

    kind: Literal["content", "reasoning", "call"]
    id: str = ""
    name: str = ""
    text: str = ""

    @property
    def input(self) -> Any:
        """The parsed arguments of a call; None if they were truncated."""
        with suppress(json.JSONDecodeError):
            return json.loads(self.text)
        return None


class Written:
    """An answer with one choice; iterate over it for its parts.

    Attributes:
        body: the request, as OpenAI's API has it.
        blocks: the blocks that `parts` has yielded so far.
        finish: OpenAI's finish reason; "" before the end.
        stop: the stop string of the request that ended the answer.
        read_seconds: time to read the prompt, including the wait for a slot.
    """

    def __init__(
        self, model: ServedModel, body: ChatBody | CompletionBody, begin: Callable[[], None]
    ) -> None:
        """Prepare only: iteration starts the answer. `begin` is called while the prompt is read."""
        self.model, self.body = model, body
        self.blocks: list[Block] = []
        self.finish = ""
        self.stop: str | None = None
        self.usage = Usage()
        self._untaken: list[TokenLogprobs] = []
        self.started = time.time()
        self.read_seconds = self.write_seconds = 0.0
        self._begin = begin

    def __iter__(self) -> Iterator[Part]:
        clock = time.monotonic()

        def on_read(_done: int, _all: int) -> None:
            self.read_seconds = time.monotonic() - clock
            self._begin()

        for events in self.model.answers(self.body, self.model.terms(on_read=on_read)):
            for event in events:
                self.write_seconds = time.monotonic() - clock - self.read_seconds
                match event:
                    case Started(usage):
                        self.usage = usage
                    case Done(finish, usage, stop, logprobs):
                        self.finish, self.usage, self.stop = finish, usage, stop
                        self._untaken += logprobs
                    case _:
                        self.usage = replace(self.usage, sampled=event.sampled)
                        self._untaken += event.logprobs
                        yield event

    def parts(self) -> Iterator[tuple[Block, str | None]]:
        """Yield (block, text): "" when a block starts, then its parts, None when it ends.

        There is at least one block.
        """
        index: int | None = None
        number: int | None
        for part in self:
            match part:
                case ToolCall(number, id_, name, text):
                    kind, block = "call", Block("call", id_, name)
                case Reasoning(text):
                    number, kind, block = None, "reasoning", Block("reasoning")
                case _:
                    number, kind, block, text = None, "content", Block("content"), part.text
            if kind == "content" and not text and not part.logprobs:
                continue  # a token without text
            last = self.blocks[-1] if self.blocks else None
            if last is None or (last.kind, index) != (kind, number):
                if last is not None:
                    yield last, None
                index, last = number, block
                self.blocks.append(last)
                yield last, ""
            if text:
                last.text += text
                yield last, text
        if not self.blocks:
            self.blocks.append(Block("content"))
            yield self.blocks[0], ""
        yield self.blocks[-1], None

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return the log probabilities of all tokens since the last call."""
        taken, self._untaken = self._untaken, []
        return taken

    def all_blocks(self) -> list[Block]:
        for _ in self.parts():
            pass
        return self.blocks


def written(
    request: Request,
    body: ChatBody | CompletionBody,
    name: str | None,
    whole: Callable[[Written], Any],
    events: Callable[[Written], Iterator[Any]],
    keep_alive: float | None = None,
) -> Response:
    """Return the response to a request: the JSON of `whole`, or the stream of `events`."""
    source = models_of(request).find(name, embeds=False)

    def stream(model: ServedModel, sent: Events) -> None:
        for event in events(Written(model, body, sent.begin)):
            sent.send(event)

    if body.stream:
        return EventAnswer(request, source, stream, keep_alive)

    def work(model: ServedModel) -> Any:
        return whole(Written(model, body, lambda: None))

    return JsonAnswer(request, source, work, keep_alive)


def body_of(
    kind: type[AnyBody], fields: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> AnyBody:
    """Return an OpenAI body made of these fields; errors use the `names` of a dialect's fields."""
    try:
        return kind.model_validate({name: v for name, v in fields.items() if v is not None})
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        if first["loc"]:
            field, *rest = first["loc"]
            first["loc"] = ((names or {}).get(field, field), *rest)
        raise field_refusal(first) from None


def arguments_of(given: Any) -> str:
    """Return the arguments of a call as JSON; clients may send them as JSON already."""
    return given if isinstance(given, str) else json.dumps(given)
