"""Answers: the model works in a thread of its own while its client is there, and no longer."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio import from_thread, to_thread
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi.responses import JSONResponse, Response

from .refusals import RefusedError, refusal_of, report
from .served_model import ServedModel

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PING_SECONDS = 15
# Chunks that the model may be ahead of its client.
MOST_UNSENT = 64

logger = logging.getLogger("uvicorn.error")


class Turns:
    """Whose turn it is: one request at a time, the others in the order they came."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._lock = anyio.Lock()
        self._waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[ServedModel]:
        """Wait for the model, and have it.

        Raises:
            RefusedError: too many wait already, or it took too long.
        """
        limits = self.model.limits
        if self._waiting >= limits.waiting:
            raise RefusedError(503, f"{limits.waiting} requests wait already: try again later")
        self._waiting += 1
        try:
            with anyio.move_on_after(limits.wait_seconds) as patience:
                await self._lock.acquire()
        finally:
            self._waiting -= 1
        if patience.cancelled_caught:
            raise RefusedError(
                503,
                f"the model was busy for {limits.wait_seconds:g} seconds: try again later, or "
                "start the server with a higher --max-wait",
            )
        try:
            yield self.model
        finally:
            self._lock.release()


class Answer(Response):
    """A response that the model makes while it is sent; the client gets JSON."""

    def __init__(self, turns: Turns, work: Callable[[ServedModel], Any]) -> None:
        """`work` is called in a thread when it is this request's turn."""
        super().__init__()
        self._turns = turns
        self._work = work

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or be silent if the client leaves."""
        async with _while_connected(receive):
            try:
                response: Response = JSONResponse(await self._result())
            except Exception as error:
                response = refused(scope, error)
            await response(scope, receive, send)

    async def _result(self) -> Any:
        async with self._turns.turn() as model:

            def work() -> Any:
                with model.at_work(from_thread.check_cancelled):
                    return self._work(model)

            return await to_thread.run_sync(work)


class EventAnswer(Answer):
    """A stream of events, each a chunk that the model made.

    The status is sent once the prompt is being read: so what is wrong with a request is told by the
    status, and the client of a long prompt knows that it is read. What goes wrong then is the last
    event.
    """

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or be silent if the client leaves."""
        events = _Events(send)
        async with _while_connected(receive) as group:
            to_send, made = anyio.create_memory_object_stream[Any](MOST_UNSENT)
            group.start_soon(self._make, to_send)
            try:
                await _send_all(events, made)
            except Exception as error:
                if not events.started:
                    await refused(scope, error)(scope, receive, send)
                    return
                await events.send(json.dumps(_reported(scope, error).body()))
            await events.end()

    async def _make(self, made: MemoryObjectSendStream[Any]) -> None:
        """Let the model make chunks; a None says that it reads, and an error is the last."""
        async with made:
            try:
                async with self._turns.turn() as model:
                    await to_thread.run_sync(self._make_here, model, made)
            except Exception as error:
                await made.send(error)

    def _make_here(self, model: ServedModel, made: MemoryObjectSendStream[Any]) -> None:
        def on_read() -> None:
            from_thread.run(made.send, None)

        with model.at_work(from_thread.check_cancelled, on_read):
            for chunk in self._work(model):
                from_thread.run(made.send, chunk)


async def _send_all(events: _Events, made: MemoryObjectReceiveStream[Any]) -> None:
    """Send chunks until there are no more, or an error comes, which is raised."""
    async with made:
        while True:
            chunk = None
            with anyio.move_on_after(PING_SECONDS) as silence:
                try:
                    chunk = await made.receive()
                except anyio.EndOfStream:
                    break
            if silence.cancelled_caught:
                await events.ping()
            elif chunk is None:
                await events.start()
            elif isinstance(chunk, Exception):
                raise chunk
            else:
                await events.send(json.dumps(chunk))
    await events.send("[DONE]")


class _Events:
    """Server-sent events on their way to a client.

    Attributes:
        started: whether the status has been sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self) -> None:
        """Send the status, if it has not been sent."""
        if self.started:
            return
        self.started = True
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(self, data: str) -> None:
        """Send an event."""
        await self.start()
        await self._send_body(f"data: {data}\n\n".encode())

    async def ping(self) -> None:
        """Send what clients skip, so that nothing in between takes the connection for dead."""
        if self.started:
            await self._send_body(b": still here\n\n")

    async def end(self) -> None:
        """Say that there are no more."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


@asynccontextmanager
async def _while_connected(receive: Receive) -> AsyncIterator[TaskGroup]:
    """Do this as long as the client is there; the group is for more of it."""
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        yield group
        group.cancel_scope.cancel()


def refused(scope: Message, error: Exception) -> JSONResponse:
    """The response to a request that failed, which is also shown in the terminal."""
    refusal = _reported(scope, error)
    return JSONResponse(refusal.body(), refusal.status)


def _reported(scope: Message, error: Exception) -> RefusedError:
    refusal = refusal_of(error)
    report(refusal, scope["method"], scope["path"], error)
    return refusal
