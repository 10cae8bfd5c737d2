"""Answers: each is made in a thread of its own while its client is there, and no longer."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from typing import Any

import anyio
from anyio import from_thread, to_thread
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi.responses import JSONResponse, Response

from .refusals import RefusedError, refusal_of, report

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# Called with what is to be called after each piece of a prompt (of a `ToldAnswer` with its teller);
# returns the body of an answer, or the chunks of a stream.
Work = Callable[[Any], Any]
# Calls a function in a thread.
Run = Callable[[Callable[[], Any]], Awaitable[Any]]

PING_SECONDS = 15
# Chunks that the model may be ahead of its client.
MOST_UNSENT = 64

logger = logging.getLogger("uvicorn.error")


class Threads:
    """Threads for the requests to one model that are answered or wait.

    Args:
        n_at_once: requests that are answered at the same time.
        waiting: most of them that wait.
    """

    def __init__(self, n_at_once: int, waiting: int) -> None:
        self._waiting = waiting
        self._most = n_at_once + waiting
        self._n = 0

    @cached_property
    def _limiter(self) -> anyio.CapacityLimiter:
        return anyio.CapacityLimiter(self._most)  # made where the event loop runs

    async def run(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, from a thread of its own; it waits for its place there.

        Raises:
            RefusedError: too many wait already.
        """
        if self._n >= self._most:
            raise RefusedError(503, f"{self._waiting} requests wait already: try again later")
        self._n += 1
        try:
            return await to_thread.run_sync(work, limiter=self._limiter)
        finally:
            self._n -= 1


class Answer(Response):
    """A response that is made while it is sent; the client gets JSON."""

    def __init__(self, run: Run, work: Work) -> None:
        """`work` is called in a thread, by `run`."""
        super().__init__()
        self._run = run
        self._work = work

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, or be silent if the client leaves."""
        async with _while_connected(receive):
            try:
                response: Response = await self._run(self._made)
            except Exception as error:
                response = refused(scope, error)
            await response(scope, receive, send)

    def _made(self) -> Response:
        return JSONResponse(self._work(_nothing))  # written there, too: a long one takes its time


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
                await self._run(partial(self._make_here, made))
            except Exception as error:
                await made.send(error)

    def _make_here(self, made: MemoryObjectSendStream[Any]) -> None:
        has_begun = False

        def on_read() -> None:
            nonlocal has_begun
            if not has_begun:  # once: the other texts wait meanwhile
                has_begun = True
                from_thread.run(made.send, None)

        for chunk in self._work(on_read):
            from_thread.run(made.send, chunk)


class ToldAnswer(EventAnswer):
    """A stream of events that the work tells one by one, whatever it is at; it gets a `Teller`."""

    def _make_here(self, made: MemoryObjectSendStream[Any]) -> None:
        self._work(Teller(made))


class Teller:
    """Sends events from a thread; it raises what anyio raises when the client has left."""

    def __init__(self, made: MemoryObjectSendStream[Any]) -> None:
        self._made = made

    @property
    def is_heard(self) -> bool:
        """Whether the client is still there; from any thread."""
        return self._made.statistics().open_receive_streams > 0

    def tell(self, event: Any) -> None:
        """Send an event, and wait for a client that is slow."""
        from_thread.run(self._made.send, event)

    def mention(self, event: Any) -> None:
        """Send an event, unless the client is slow: other texts wait meanwhile."""
        from_thread.run_sync(self._offer, event)

    def _offer(self, event: Any) -> None:
        with suppress(anyio.WouldBlock):
            self._made.send_nowait(event)


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


def _nothing() -> None:
    pass
