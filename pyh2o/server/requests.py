"""What every route does with a request: its key, its body, its model and its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import anyio
from anyio import from_thread
from fastapi import Request, Security
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ValidationError

from .answers import Answer, EventAnswer, Events
from .models import ModelSource, ServedModels
from .refusals import RefusedError, body_refusal

# The rest of a body that is too long is read for so long, or its client would miss the answer.
DRAIN_SECONDS = 10

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
        RefusedError: it is too long, not JSON, or not of this kind.
    """
    # A page of any site may send what is not called JSON without asking first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RefusedError(415, "the header Content-Type has to be application/json")
    limits = models_of(request).limits
    body, stream = bytearray(), request.stream()
    async for piece in stream:
        body += piece
        if len(body) > limits.body_bytes:
            body.clear()
            with anyio.move_on_after(DRAIN_SECONDS):
                async for _ in stream:
                    pass
            raise RefusedError(
                413,
                f"the body has more than {limits.body_mib} MiB: send less, or start the server "
                "with a higher --max-body-mib",
            )
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise body_refusal(error) from None


def models_of(request: Request) -> ServedModels:
    """The models of the server."""
    models: ServedModels = request.app.state.models
    return models


def answered(
    request: Request, source: ModelSource, work: Callable[[Any], Any], *, waits: bool = True
) -> Answer:
    """The answer that a model gives.

    Args:
        request: the request.
        source: of the model.
        work: called in a thread with the model, loaded; returns what is sent as JSON.
        waits: whether it is one of those that take a place, or wait for one.
    """
    models = models_of(request)

    def in_thread() -> Any:
        with models.lease(source, from_thread.check_cancelled, waits=waits) as model:
            return work(model)

    return Answer(in_thread)


def streamed(
    request: Request, source: ModelSource, work: Callable[[Any, Events], None]
) -> EventAnswer:
    """The same, sent as it is made: `work` also gets what sends its events."""
    models = models_of(request)

    def in_thread(events: Events) -> None:
        with models.lease(source, from_thread.check_cancelled) as model:
            work(model, events)

    return EventAnswer(in_thread)


# ---------------------------------------------------------------------------------------------
# The description at /openapi.json
# ---------------------------------------------------------------------------------------------


def takes(kind: type[BaseModel]) -> dict[str, Any]:
    """The description of a body; `described` puts its parts in place."""
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
    return document
