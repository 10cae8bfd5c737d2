"""Checks of every request before its route runs: the API key and the body."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.types import Message

from .dialect import OPENAI, Dialect
from .refusals import RefusedError, field_name

# Time to read the rest of a body that is too long: a client that still sends reads no response.
DRAIN_SECONDS = 10
# Surrogates in the bytes of a body, escaped or not, and unpaired ones in its parsed strings.
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_LONE = re.compile("[\ud800-\udfff]")
JSON_HEADER = (b"content-type", b"application/json")


class CheckedRoute(APIRoute):
    """A route that checks the API key and the body first."""

    dialect: Dialect = OPENAI

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.methods == {"GET"}:
            self.methods.add("HEAD")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Any]]:
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


def routes_of(dialect: Dialect) -> APIRouter:
    """Return an empty router whose responses have this format."""
    return APIRouter(route_class=type("_Route", (CheckedRoute,), {"dialect": dialect}))


def _check_key(request: Request) -> None:
    api_key = request.app.state.api_key
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")  # as Anthropic's clients send it
    if api_key is not None and not secrets.compare_digest(given.strip().encode(), api_key.encode()):
        raise RefusedError(401, "invalid API key: send the server's --api-key as bearer token")


async def _read(request: Request) -> bytes:
    # Web pages of any origin may send other content types without a preflight request. curl sends
    # another type too, but neither of these headers.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_of_page = any(name in request.headers for name in ("origin", "sec-fetch-site"))
    if content_type != "application/json" and is_of_page:
        raise RefusedError(415, "the header Content-Type must be application/json")
    limits = request.app.state.models.limits
    body, stream = bytearray(), request.stream()
    async for chunk in stream:
        body += chunk
        if len(body) > limits.body_mib * 2**20:
            body.clear()
            with anyio.move_on_after(DRAIN_SECONDS):
                async for _ in stream:
                    pass
            raise RefusedError(
                413,
                f"the body exceeds {limits.body_mib} MiB: send less, or start the server with a "
                "higher --max-body-mib",
            )
    _check_texts(bytes(body))
    return bytes(body)


def _check_texts(body: bytes) -> None:
    """Raise a RefusedError if a string has a lone surrogate, which UTF-8 cannot encode."""
    if not _HALVES.search(body):
        return
    try:
        left: list[tuple[tuple[Any, ...], Any]] = [((), json.loads(body))]
    except (ValueError, RecursionError):
        return  # FastAPI parses the body again and reports the error
    for path, value in left:
        if isinstance(value, dict):
            left += [(path, name) for name in value]
            left += [((*path, name), each) for name, each in value.items()]
        elif isinstance(value, list):
            left += [((*path, number), each) for number, each in enumerate(value)]
        elif isinstance(value, str) and _LONE.search(value):
            name = field_name(path)
            reason = "contains a lone surrogate, half of a character: send whole characters"
            raise RefusedError(400, f"{name or 'the body'}: {reason}", param=name or None)
