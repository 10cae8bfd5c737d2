"""What every route does with a request first: its key, and its body."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Message

from .dialect import OPENAI, Dialect
from .refusals import RefusedError, field_name

# The rest of a body that is too long is read for so long, or its client would miss the answer.
DRAIN_SECONDS = 10
# Surrogates in the bytes of a body, escaped or not; and those that were not paired in its texts.
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_LONE = re.compile("[\ud800-\udfff]")
JSON_HEADER = (b"content-type", b"application/json")


class CheckedRoute(APIRoute):
    """A route that looks at the key, and at the size of a body, before anything is made of it.

    Attributes:
        dialect: in which it is answered.
    """

    dialect: Dialect = OPENAI

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.methods == {"GET"}:
            self.methods.add("HEAD")

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

            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            scope = {**request.scope, "headers": [*headers, JSON_HEADER]}
            return await handle(Request(scope, receive))

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
        RefusedError: it is too long, comes from a web page under another content type than JSON, or
            contains a lone surrogate.
    """
    # A page of any site may send other content types without a preflight. So does curl, which sends
    # neither of these headers.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_of_page = any(name in request.headers for name in ("origin", "sec-fetch-site"))
    if content_type != "application/json" and is_of_page:
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
    _check_texts(bytes(body))
    return bytes(body)


def _check_texts(body: bytes) -> None:
    """Refuse a body with a lone surrogate, which cannot be encoded as UTF-8.

    Raises:
        RefusedError: names the field.
    """
    if not _HALVES.search(body):
        return
    try:
        left: list[tuple[tuple[Any, ...], Any]] = [((), json.loads(body))]
    except (ValueError, RecursionError):
        return  # FastAPI parses it again, and reports that
    for way, value in left:
        if isinstance(value, dict):
            left += [(way, name) for name in value]
            left += [((*way, name), each) for name, each in value.items()]
        elif isinstance(value, list):
            left += [((*way, number), each) for number, each in enumerate(value)]
        elif isinstance(value, str) and _LONE.search(value):
            name = field_name(way)
            reason = (
                "contains a lone surrogate, which is half of a character: send whole characters"
            )
            raise RefusedError(400, f"{name or 'the body'}: {reason}", param=name or None)
