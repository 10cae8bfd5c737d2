"""What every route does with a request first: its key, and its body."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Message

from .dialect import OPENAI, Dialect
from .refusals import RefusedError

# The rest of a body that is too long is read for so long, or its client would miss the answer.
DRAIN_SECONDS = 10


class CheckedRoute(APIRoute):
    """A route that looks at the key, and at the size of a body, before anything is made of it.

    Attributes:
        dialect: in which it is answered.
    """

    dialect: Dialect = OPENAI

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


def _check_key(request: Request) -> None:
    api_key = request.app.state.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")  # as Anthropic's clients send it
    if api_key is not None and not secrets.compare_digest(given.strip().encode(), api_key.encode()):
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
    limits = request.app.state.models.limits
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
