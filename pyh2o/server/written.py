"""What a model writes for a request of another dialect: chat completions, in pieces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError

from ..writing.chat_parser import Delta
from .answers import Answer, EventAnswer, Events, models_of
from .bodies import ChatBody, CompletionBody, Strict
from .refusals import field_refusal
from .served_model import ServedCompletions, ServedModel

AnyBody = TypeVar("AnyBody", bound=Strict)


@dataclass
class Block:
    """A stretch of an answer of one kind.

    Attributes:
        kind: "content", "thought", or "call" of a tool, whose text is its arguments.
        id, name: of a call.
        text: so far.
    """

    kind: Literal["content", "thought", "call"]
    id: str = ""
    name: str = ""
    text: str = ""

    @property
    def input(self) -> Any:
        """The arguments of a call; None if they were cut."""
        with suppress(json.JSONDecodeError):
            return json.loads(self.text)
        return None


class Written:
    """A text in the making; whoever iterates over it gets its pieces.

    One is empty only if it has log probabilities.

    Attributes:
        body: what is asked for, in OpenAI's words.
        model: that writes it.
        blocks: what it consists of, as far as `parts` was asked for it.
        finish: OpenAI's word for why it ended; "" before.
        logprobs: of the newest piece, as OpenAI has them; None if they are not asked for.
        started: when it was begun, in seconds since 1970.
        read_seconds: what the prompt took, with the wait for a place.
        write_seconds: what the text took so far.
    """

    def __init__(
        self, model: ServedModel, body: ChatBody | CompletionBody, begin: Callable[[], None]
    ) -> None:
        """`begin` is called when the prompt is being read."""
        self.model, self.body = model, body
        self.blocks: list[Block] = []
        self.finish = ""
        self.logprobs: Any = None
        self._untaken: list[Any] = []
        self.started = time.time()
        self.read_seconds = self.write_seconds = 0.0
        self._clock = time.monotonic()

        def on_read(_done: int, _all: int) -> None:
            self.read_seconds = time.monotonic() - self._clock
            begin()

        body = body.model_copy(update={"stream": True})
        self._completions = ServedCompletions(model, body, model.terms(on_read=on_read))
        self.usage = self._completions.usage

    @property
    def stop(self) -> str | None:
        """The stop string of the request that ended it."""
        return self._completions.stop

    def __iter__(self) -> Iterator[Delta]:
        n_calls = 0
        for chunk in self._completions.result():
            [choice] = chunk["choices"]
            self.write_seconds = time.monotonic() - self._clock - self.read_seconds
            self.finish = choice["finish_reason"] or ""
            self.logprobs = choice["logprobs"]
            self._untaken += [self.logprobs] if self.logprobs else []
            delta = choice.get("delta", choice)
            for call in delta.get("tool_calls") or ():
                index, function = call["index"], call["function"]
                if index == n_calls:
                    n_calls += 1
                    yield Delta(call=index, id=call["id"], name=function["name"])
                if function["arguments"]:
                    yield Delta(call=index, arguments=function["arguments"])
            thought = delta.get("reasoning_content") or ""
            content = delta.get("content") or delta.get("text") or ""
            if thought or content or (self.logprobs and not delta.get("tool_calls")):
                yield Delta(thought=thought, content=content)

    def parts(self) -> Iterator[tuple[Block, str | None]]:
        """The blocks, each with "" when it begins, then its pieces, and None when it ends.

        There is at least one.
        """
        index: int | None = None
        for delta in self:
            kind: Any = "content" if delta.call is None else "call"
            kind = "thought" if delta.thought else kind
            last = self.blocks[-1] if self.blocks else None
            if last is None or (last.kind, index) != (kind, delta.call):
                if last is not None:
                    yield last, None
                index, last = delta.call, Block(kind, delta.id, delta.name)
                self.blocks.append(last)
                yield last, ""
            if piece := delta.thought or delta.content or delta.arguments:
                last.text += piece
                yield last, piece
        if not self.blocks:
            self.blocks.append(Block("content"))
            yield self.blocks[0], ""
        yield self.blocks[-1], None

    def take_logprobs(self) -> list[Any]:
        """The log probabilities of all pieces since this was asked last."""
        taken, self._untaken = self._untaken, []
        return taken

    def all_blocks(self) -> list[Block]:
        """All of it."""
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
    """The answer to a request in a dialect: its JSON, or its events if the body has a stream.

    Args:
        request: what is answered.
        body: what is asked for, in OpenAI's words.
        name: of the model; None for the first.
        whole: makes the JSON.
        events: makes the events.
        keep_alive: idle seconds after which the model is closed (see `ServedModels.lease`).
    """
    source = models_of(request).find(name, embeds=False)

    def stream(model: ServedModel, sent: Events) -> None:
        for event in events(Written(model, body, sent.begin)):
            sent.send(event)

    if body.stream:
        return EventAnswer(request, source, stream, keep_alive)

    def work(model: ServedModel) -> Any:
        return whole(Written(model, body, lambda: None))

    return Answer(request, source, work, keep_alive)


def body_of(
    kind: type[AnyBody], fields: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> AnyBody:
    """A body in OpenAI's words, of fields of a dialect; `names` are those that clients know.

    Raises:
        RefusedError: a field is wrong.
    """
    try:
        return kind.model_validate({name: v for name, v in fields.items() if v is not None})
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
        if first["loc"]:
            field, *rest = first["loc"]
            first["loc"] = ((names or {}).get(field, field), *rest)
        raise field_refusal(first) from None


def arguments_of(given: Any) -> str:
    """The arguments of a call in JSON; a client may already send them so, cut or not."""
    return given if isinstance(given, str) else json.dumps(given)
