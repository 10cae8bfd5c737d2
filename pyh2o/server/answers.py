"""Responses computed in a thread, which is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from anyio import from_thread, to_thread
from anyio.abc import TaskGroup
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .dialect import Dialect, dialect_of
from .models import ModelSource, ServedModels
from .refusals import logged_refusal, refusal_response

PING_SECONDS = 15
# A client that does not read for this long is disconnected: it occupies a slot.
SEND_SECONDS = 60


def models_of(request: Request) -> ServedModels:
    models: ServedModels = request.app.state.models
    return models


class JsonAnswer(Response):
    """A JSON response from a model.

    Args:
        work: called in a thread with the loaded model; returns the JSON.
        keep_alive: idle seconds after which the model is closed (see `ServedModels.lease`).
    """

    def __init__(
        self,
        request: Request,
        source: ModelSource,
        work: Callable[..., Any],
        keep_alive: float | None = None,
    ) -> None:
        super().__init__()
        lease, check = models_of(request).lease, from_thread.check_cancelled
        self._lease = partial(lease, source, check, keep_alive)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive):
            try:
                # serialized in the thread too: a long response takes time
                response: Response = await self._in_thread(JSONResponse)
            except Exception as error:
                response = refusal_response(scope, error)
            await response(scope, receive, send)

    async def _in_thread(self, made_of: Callable[[Any], Any], *events: Events) -> Any:
        def work() -> Any:
            with self._lease() as model:
                result = self._work(model, *events)
            return made_of(result)

        # One limiter per request: `ServedModels` limits the number of requests.
        return await to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))


class EventAnswer(JsonAnswer):
    """A stream of events; `work` also gets the `Events` to send them with.

    The status is sent with the first event or by `Events.begin`. Earlier errors have their own
    status, later ones become the last event.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_connected(receive) as group:
            dialect = dialect_of(scope)
            events = Events(send, group, dialect)
            group.start_soon(events.ping)
            try:
                await self._in_thread(lambda nothing: nothing, events)
                await events.end(dialect.end)
            except Exception as error:
                if events.started:
                    await events.end(dialect.line(dialect.error(logged_refusal(scope, error))))
                else:
                    await refusal_response(scope, error)(scope, receive, send)


class Events:
    """Sends events to a client, from the thread that computes them."""

    def __init__(self, send: Send, client: TaskGroup, dialect: Dialect) -> None:
        self._send = send
        self._client = client
        self._dialect = dialect
        # anyio.Lock would block forever in a task that a thread starts after a disconnect
        self._one_by_one = asyncio.Lock()
        self._ended = False
        self.started = False

    @property
    def is_connected(self) -> bool:
        """Whether the client is still connected; from any thread."""
        return not self._client.cancel_scope.cancel_called

    def begin(self) -> None:
        """Send the status; from the computing thread."""
        if not self.started:
            from_thread.run(self._put, "")

    def send(self, event: Any) -> None:
        """Send an event, and block while the client is slow; from the computing thread.

        Raises:
            BaseException: anyio's cancellation, if the client has disconnected.
        """
        from_thread.check_cancelled()
        from_thread.run(self._put, self._dialect.line(event))

    def offer(self, event: Any) -> None:
        """Send an event without blocking, or skip it if the client is slow; from that thread."""
        from_thread.check_cancelled()
        if not self._one_by_one.locked():
            line = self._dialect.line(event)
            from_thread.run_sync(partial(self._client.start_soon, self._put, line))

    async def ping(self) -> None:
        """Send keep-alives, so that proxies do not close an idle connection."""
        while True:
            await anyio.sleep(PING_SECONDS)
            if self.started:
                await self._put(self._dialect.ping)

    async def end(self, last: str) -> None:
        await self._put(last, is_last=True)

    async def _put(self, text: str, *, is_last: bool = False) -> None:
        async with self._one_by_one:
            if self._ended:
                return
            self._ended = is_last
            if not self.started:
                media_type = self._dialect.media_type.encode()
                headers = [(b"content-type", media_type), (b"cache-control", b"no-store")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self.started = True
            with anyio.move_on_after(SEND_SECONDS) as patience:
                await self._send(
                    {"type": "http.response.body", "body": text.encode(), "more_body": not is_last}
                )
            if patience.cancelled_caught:
                self._client.cancel_scope.cancel()


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[TaskGroup]:
    """Cancel the body of the `with` statement, and the group, when the client disconnects."""
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        yield group
        group.cancel_scope.cancel()
