"""What every route does with a request: its key, its body, its model and its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
from anyio import from_thread
from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.types import Message

from .answers import Answer, EventAnswer, Events
from .models import ModelSource, ServedModels
from .refusals import RefusedError

# The rest of a body that is too long is read for so long, or its client would miss the answer.
DRAIN_SECONDS = 10


class CheckedRoute(APIRoute):
    """A route that looks at the key, and at the size of a body, before anything is made of it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Any]]:
        """What answers a request."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Any:
            _check_key(request)
            if self.body_field is None:
                return await handle(request)
            body = await _read(request)

            async def receive() -> Message:
                return {"type": "http.request", "body": body}

            return await handle(Request(request.scope, receive))

        return checked


def checked_router(**settings: Any) -> APIRouter:
    """A router whose routes want the server's key."""
    # For the description alone: `_check_key` says what is wrong in the words of all refusals.
    bearer = HTTPBearer(auto_error=False, description="the server's --api-key, if it has one")
    return APIRouter(route_class=CheckedRoute, dependencies=[Depends(bearer)], **settings)


def _check_key(request: Request) -> None:
    api_key = request.app.state.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if api_key is None:
        return
    if scheme.lower() != "bearer" or not secrets.compare_digest(
        given.strip().encode(), api_key.encode()
    ):
        raise RefusedError(401, "Invalid API key: send the server's --api-key as bearer token")


async def _read(request: Request) -> bytes:
    """The body of a request.

    Raises:
        RefusedError: it is too long, or not called JSON.
    """
    # A page of any site may send what is not called JSON without asking first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RefusedError(415, "the header Content-Type has to be application/json")
    limits = models_of(request).limits
    body, stream = bytearray(), request.stream()
    async for piece in stream:
        body += piece
        if len(body) > limits.body_mib * 2**20:
            body.clear()
            with anyio.move_on_after(DRAIN_SECONDS):
                async for _ in stream:
                    pass
            raise RefusedError(
                413,
                f"the body has more than {limits.body_mib} MiB: send less, or start the server "
                "with a higher --max-body-mib",
            )
    return bytes(body)


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
    return Answer(partial(_with_model, request, source, waits, work))


def streamed(
    request: Request, source: ModelSource, work: Callable[[Any, Events], None]
) -> EventAnswer:
    """The same, sent as it is made: `work` also gets what sends its events."""
    return EventAnswer(partial(_with_model, request, source, True, work))


def _with_model(
    request: Request, source: ModelSource, waits: bool, work: Callable[..., Any], *events: Events
) -> Any:
    with models_of(request).lease(source, from_thread.check_cancelled, waits=waits) as model:
        return work(model, *events)
