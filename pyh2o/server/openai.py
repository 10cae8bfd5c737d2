"""OpenAI's completions and chat completions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..compat.results import Results, usage_json
from ..engine.engine import Terms
from ..writing.prompt import infill_tokens, prompt_text
from .answers import EventAnswer, Events, JsonAnswer, models_of
from .bodies import ChatBody, CompletionBody
from .custom_tools import chunks_with_custom_calls, with_custom_calls
from .requests import CheckedRoute
from .served_model import ServedModel

openai_routes = APIRouter(route_class=CheckedRoute)


@openai_routes.post("/v1/completions")
async def _complete(request: Request, body: CompletionBody) -> Response:
    return _written(request, body)


@openai_routes.post("/v1/chat/completions")
async def _chat(request: Request, body: ChatBody) -> Response:
    return _written(request, body)


def _written(request: Request, body: CompletionBody | ChatBody) -> Response:
    source = models_of(request).find(body.model, embeds=False)

    def stream(model: ServedModel, events: Events) -> None:
        for chunk in chunks_of(model, body, model.terms(on_read=lambda *_: events.begin())):
            events.send(chunk)

    if body.stream:
        return EventAnswer(request, source, stream)
    return JsonAnswer(request, source, lambda model: result_of(model, body, model.terms()))


def result_of(model: ServedModel, body: CompletionBody | ChatBody, terms: Terms) -> dict[str, Any]:
    """Return the result of a request; errors as in `ServedModel.answers`."""
    results, choices = _results(model, body), list[dict[str, Any]]()
    for index, events in enumerate(model.answers(body, terms)):
        choice = results.choice(events, index)
        if isinstance(body, CompletionBody):
            if body.suffix is not None and infill_tokens(model.engine.model) is None:
                choice["text"] += body.suffix
            choice["text"] = _echo(model, body, index) + choice["text"]
        choices.append(choice)
    result = results.result(choices, usage_json(results.usage))
    names = _custom_tools(body)
    return with_custom_calls(result, names) if names else result


def chunks_of(
    model: ServedModel, body: CompletionBody | ChatBody, terms: Terms
) -> Iterator[dict[str, Any]]:
    """Return the chunks of a request's stream; errors as in `ServedModel.answers`."""
    names, chunks = _custom_tools(body), _chunks(model, body, terms)
    return chunks_with_custom_calls(chunks, names) if names else chunks


def _chunks(
    model: ServedModel, body: CompletionBody | ChatBody, terms: Terms
) -> Iterator[dict[str, Any]]:
    wants_usage = body.stream_options.include_usage
    no_usage = {"usage": None} if wants_usage else {}
    results = _results(model, body)
    for index, events in enumerate(model.answers(body, terms)):
        chunks = results.chunks(events, index)
        first = next(chunks)
        if echo := _echo(model, body, index):
            yield {**results.chunk({"text": echo}, index), **no_usage}
        for chunk in itertools.chain([first], chunks):
            yield {**chunk, **no_usage}
    if wants_usage:
        yield {**results.chunk({}), "choices": [], "usage": usage_json(results.usage)}


def _results(model: ServedModel, body: CompletionBody | ChatBody) -> Results:
    if isinstance(body, CompletionBody):
        return Results(model.name, is_chat=False, top_logprobs=body.logprobs)
    return Results(
        model.name, is_chat=True, top_logprobs=body.top_logprobs if body.logprobs else None
    )


def _echo(model: ServedModel, body: CompletionBody | ChatBody, index: int) -> str:
    if not isinstance(body, CompletionBody) or not body.echo:
        return ""
    return prompt_text(model.engine.model, body.prompt[index // body.n])


def _custom_tools(body: CompletionBody | ChatBody) -> set[str]:
    return body.custom_tools if isinstance(body, ChatBody) else set()
