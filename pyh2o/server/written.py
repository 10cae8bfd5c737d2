"""What a model writes for a request of another dialect: chat completions, in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError

from .answers import Answer, EventAnswer, Events, models_of
from .bodies import ChatBody, CompletionBody, Strict
from .refusals import field_refusal
from .served_model import ServedCompletions, ServedModel

AnyBody = TypeVar("AnyBody", bound=Strict)


class Written:
    """A text in the making; whoever iterates over it gets its pieces.

    One is empty only if it has log probabilities.

    Attributes:
        body: what is asked for, in OpenAI's words.
        model: that writes it.
        tool: the function whose arguments it is, or None for an answer.
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
        self.tool = body.forced_tool() if isinstance(body, ChatBody) else None
        self.finish = ""
        self.logprobs: Any = None
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

    def __iter__(self) -> Iterator[str]:
        for chunk in self._completions.result():
            [choice] = chunk["choices"]
            self.write_seconds = time.monotonic() - self._clock - self.read_seconds
            self.finish = choice["finish_reason"] or ""
            self.logprobs = choice["logprobs"]
            delta = choice.get("delta", choice)
            calls = delta.get("tool_calls")
            text = calls[0]["function"]["arguments"] if calls else delta.get("content")
            text = text or delta.get("text") or ""
            if text or self.logprobs:
                yield text

    def text(self) -> str:
        """All of it."""
        return "".join(self)


def written(
    request: Request,
    body: ChatBody | CompletionBody,
    name: str | None,
    whole: Callable[[Written], Any],
    events: Callable[[Written], Iterator[Any]],
) -> Response:
    """The answer to a request in a dialect: its JSON, or its events if the body has a stream.

    Args:
        request: what is answered.
        body: what is asked for, in OpenAI's words.
        name: of the model; None for the first.
        whole: makes the JSON.
        events: makes the events.
    """
    source = models_of(request).find(name, embeds=False)

    def stream(model: ServedModel, sent: Events) -> None:
        for event in events(Written(model, body, sent.begin)):
            sent.send(event)

    if body.stream:
        return EventAnswer(request, source, stream)
    return Answer(request, source, lambda model: whole(Written(model, body, lambda: None)))


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
