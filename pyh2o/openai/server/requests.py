"""What every route does with a request: its key, its body, its model and its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import anyio
from anyio import from_thread, to_thread
from fastapi import Request, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError

from ..limits import Limits
from .answers import Answer, EventAnswer, Threads
from .models import ModelSource, ServedModels
from .refusals import RefusedError, body_refusal

# The rest of a body that is too long is read for so long, or its client would miss the answer.
DRAIN_SECONDS = 10
# A body may take so long, and a second more for each so many bytes that have come.
BODY_SECONDS = 60.0
BYTES_A_SECOND = 16 * 2**10

# For the description alone: `check_key` says what is wrong in the words of all refusals.
_BEARER = HTTPBearer(auto_error=False, description="the server's --api-key, if it has one")

AnyBody = TypeVar("AnyBody", bound=BaseModel)


def check_key(request: Request, _key: Annotated[Any, Security(_BEARER)]) -> None:
    """Refuse a request without the server's key.

    Raises:
        RefusedError: it has none, or another one.
    """
    api_key = request.app.state.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if api_key is None:
        return
    if scheme.lower() != "bearer" or not secrets.compare_digest(
        given.strip().encode(), api_key.encode()
    ):
        raise RefusedError(401, "Invalid API key: send the server's --api-key as bearer token")


async def read(request: Request, kind: type[AnyBody]) -> AnyBody:
    """The body of a request.

    Raises:
        RefusedError: it is too long, too slow, not JSON, or not of this kind.
    """
    # A page of any site may send what is not called JSON without asking first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RefusedError(415, "the header Content-Type has to be application/json")
    data = await _body(request, models_of(request).limits)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise body_refusal(error) from None


async def _body(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    stream = request.stream()
    with anyio.move_on_after(BODY_SECONDS) as patience:
        async for piece in stream:
            body += piece
            patience.deadline += len(piece) / BYTES_A_SECOND
            if len(body) > limits.body_bytes:
                break
        else:
            return bytes(body)
    if patience.cancelled_caught:
        raise RefusedError(408, "the body came too slowly: send it anew, on a faster connection")
    body.clear()
    with anyio.move_on_after(DRAIN_SECONDS):
        async for _ in stream:
            pass
    raise RefusedError(
        413,
        f"the body has more than {limits.body_mib} MiB: send less, or start the server with a "
        "higher --max-body-mib",
    )


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a body, for the pages at /docs; `described` puts its parts in place."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def described(document: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI document with the parts of all bodies where references look for them."""
    parts = document.setdefault("components", {}).setdefault("schemas", {})
    for operations in document["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                parts.update(content["schema"].pop("$defs", {}))
                _allow_nulls(content["schema"])
    for part in parts.values():
        _allow_nulls(part)
    return document


def _allow_nulls(schema: dict[str, Any]) -> None:
    """Describe that null stands for a field that is not given."""
    null = {"type": "null"}
    fields = schema.get("properties", {})
    for name in fields.keys() - set(schema.get("required", ())):
        field = fields[name]
        if null not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "default") if key in field}
            fields[name] = {"anyOf": [*field.pop("anyOf", ()), null], **about}
            if field:
                fields[name]["anyOf"].insert(0, field)


def models_of(request: Request) -> ServedModels:
    """The models of the server."""
    models: ServedModels = request.app.state.models
    return models


def answer(
    request: Request,
    source: ModelSource,
    ask: Callable[[Any, Callable[[], None]], Any],
    *,
    stream: bool = False,
    waits: bool = True,
) -> Answer:
    """The answer that a model gives.

    Args:
        request: the request.
        source: of the model.
        ask: gets the model, loaded, and what is to be called after each piece of a prompt.
        stream: whether it is sent as it is made.
        waits: whether it takes a place, which there may be none of. Else only a model that has to
            be loaded makes it wait.
    """
    models = models_of(request)

    def work(on_read: Callable[[], None]) -> Any:
        return models.ask(source, lambda model: ask(model, on_read), from_thread.check_cancelled)

    threads: Threads = request.app.state.threads[source.name]
    run = threads.run if waits or not models.is_loaded(source) else to_thread.run_sync
    return EventAnswer(run, work) if stream else Answer(run, work)
