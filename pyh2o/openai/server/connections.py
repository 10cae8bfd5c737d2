"""Connections of clients that are slow, silent or many: how long they may take, and how many stay.

uvicorn waits for ever for a request that has begun, and for a client that does not read. Here
such a connection is cut off, and for the answer that is made for it this is a client that left.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# A connection without requests stays open for so long: people read an answer before they go on.
KEEP_ALIVE_SECONDS = 75
# A request has to be there so long after its first byte, its body left out; the first one of a
# connection so long after that was made.
ASKING_SECONDS = 60.0
# In this time a client reads all that waits for it, or so many bytes of that: else it is gone.
READING_SECONDS = 60.0
LEAST_READ = 64 * 2**10
# A wait that ends so much later than it should was slept through.
SLEEP_SECONDS = 10.0
# Of all connections: more would take time, and memory, from those that are answered.
MOST_CONNECTIONS = 1000
# New ones are taken so many at a time: what is in the system's queue meanwhile is no open file.
BACKLOG = 64


def server_config(app: Any, **settings: Any) -> uvicorn.Config:
    """How uvicorn serves the application, with these limits and with other settings of its own."""
    # The app has nothing to start or end, and a second Ctrl-C in that moment would be a traceback.
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        **settings,
    )


def most_connections() -> int:
    """How many may be open: half of the files at most, since sessions need some to be saved."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else min(MOST_CONNECTIONS, files // 2)


class Connection(H11Protocol):
    """One connection, with the time that its client may take."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request; if there are too many connections, one of them goes."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # whatever the system does not take waits for a reader
        self._reading: asyncio.TimerHandle | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()
        self._wait_for_request()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._cancel_waits()
        super().connection_lost(exc)

    @property
    def _is_answered(self) -> bool:
        """Whether a request is being answered, or its body read."""
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        """Close the connection that has asked for nothing for the longest time, or else this."""
        others = [cast("Connection", each) for each in self.connections]
        there = [each for each in others if not each.transport.is_closing()]
        if len(there) > most_connections():
            idle = [each for each in there if not each._is_answered]
            min(idle, key=lambda each: each._idle_since, default=self).transport.abort()

    # ---------------------------------------------------------------------------------------------
    # Requests that take long to come
    # ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Take a piece of a request, which does not give the rest of it more time."""
        super().data_received(data)
        if self._is_answered:
            self._cancel(self._asking)
            self._asking = None
        elif self._asking is None:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """After an answer: uvicorn's own timer runs until the next byte."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Say that this is no HTTP, unless something else has been answered already."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def _wait_for_request(self) -> None:
        end = self.loop.time() + ASKING_SECONDS
        self._asking = self.loop.call_at(end, self._look_at_asker, end)

    def _look_at_asker(self, end: float) -> None:
        if self._slept_since(end):
            self._wait_for_request()
        else:
            self.transport.abort()

    def _slept_since(self, end: float) -> bool:
        """Whether a wait ended much earlier: the machine slept, and the client may be no slower."""
        return self.loop.time() - end > SLEEP_SECONDS

    # ---------------------------------------------------------------------------------------------
    # Answers that nobody reads
    # ---------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """It has read all."""
        self._cancel(self._reading)
        super().resume_writing()

    def _wait_for_reader(self) -> None:
        n_left, end = self.transport.get_write_buffer_size(), self.loop.time() + READING_SECONDS
        self._reading = self.loop.call_at(end, self._look_at_reader, n_left, end)

    def _look_at_reader(self, n_before: int, end: float) -> None:
        n_read = n_before - self.transport.get_write_buffer_size()
        if n_read < LEAST_READ and not self._slept_since(end):
            self.transport.abort()
        else:
            self._wait_for_reader()

    def _cancel_waits(self) -> None:
        self._cancel(self._asking)
        self._cancel(self._reading)

    @staticmethod
    def _cancel(wait: asyncio.TimerHandle | None) -> None:
        if wait is not None:
            wait.cancel()
