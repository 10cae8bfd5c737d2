"""The engine for asyncio: each text in a thread of its own, awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import ClosedError
from .engine import Engine
from .requests import Completions, Terms

Self = TypeVar("Self", bound="AsyncEngine")

# Chunks of a stream that its text may be ahead of who awaits them.
MOST_UNREAD = 64
# Texts that run or wait; more of them wait without a thread.
MOST_THREADS = 512
# Between two looks whether anybody still waits for a chunk that there is no room for.
LOOK_SECONDS = 0.1


class AsyncEngine:
    """An engine whose completions are awaited; as many at once as one likes.

        async with AsyncEngine("model.gguf", texts=8) as engine:
            done = await engine.create_completion("Once upon a time", max_tokens=100)
            async for chunk in await engine.create_completion("Once", stream=True):
                ...

    A task that is cancelled, and a stream that is closed before its end, free their place at the
    next token.

    Args:
        model_path: a GGUF file.
        **settings: as for `Engine`.

    Raises:
        PyH2OError: as for `Engine`.

    Attributes:
        engine: what runs the texts.
    """

    def __init__(self, model_path: str, **settings: Any) -> None:
        self.engine = Engine(model_path, **settings)
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="pyh2o text")
        self._closed = False

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Free the model. Texts that are being read or written end with a `ClosedError`."""
        self._closed = True
        await asyncio.to_thread(self.engine.close)
        self._threads.shutdown()

    async def create_completion(
        self,
        prompt: str | Sequence[int],
        *,
        priority: int = 0,
        wait_seconds: float | None = None,
        stream: bool = False,
        **arguments: Any,
    ) -> Any:
        """As `Llama.create_completion`; a stream is an asynchronous iterator.

        Args:
            prompt: text, or tokens as they are.
            priority: texts of a higher one come first.
            wait_seconds: longest wait for a place; None for any.
            stream: whether the chunks are wanted as they come.
            **arguments: of `Llama.create_completion`.

        Raises:
            BusyError: there was no place in time.
            PyH2OError: as `Llama.create_completion` does.
        """

        def work(completions: Completions) -> Any:
            return completions.create_completion(prompt, stream=stream, **arguments)

        return await self._run(work, priority, wait_seconds, stream=stream)

    async def create_chat_completion(
        self,
        messages: Sequence[Any],
        *,
        priority: int = 0,
        wait_seconds: float | None = None,
        stream: bool = False,
        **arguments: Any,
    ) -> Any:
        """As `Llama.create_chat_completion`, with the terms of `create_completion`."""

        def work(completions: Completions) -> Any:
            return completions.create_chat_completion(messages, stream=stream, **arguments)

        return await self._run(work, priority, wait_seconds, stream=stream)

    async def _run(
        self,
        work: Callable[[Completions], Any],
        priority: int,
        wait_seconds: float | None,
        *,
        stream: bool,
    ) -> Any:
        left = threading.Event()

        def check() -> None:
            if left.is_set():
                raise _LeftError
            if self._closed:
                raise ClosedError("the engine is closed: open it again")

        check()
        completions = Completions(self.engine, Terms(priority, wait_seconds, check))
        if stream:
            chunks = _Chunks(self._threads, lambda: work(completions), check, left)
            await chunks.begin()
            return chunks
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, work, completions)
        except asyncio.CancelledError:
            left.set()
            raise


class _LeftError(Exception):
    """Nobody awaits the text any more."""


class _Chunks:
    """A stream that a thread makes and a task reads; `aclose` ends it early.

    So does a reader that leaves the loop: nothing in the thread holds this object.
    """

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[], Any],
        check: Callable[[], None],
        left: threading.Event,
    ) -> None:
        self._left = left
        self._made = _Made(check)
        self._first: list[Any] = []
        threads.submit(self._made.make, work)

    def __del__(self) -> None:
        self._left.set()

    async def begin(self) -> None:
        """Wait for the first chunk: what is wrong with a request is raised here."""
        self._first = [await self._next()]

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> Any:
        chunk = self._first.pop() if self._first else await self._next()
        if chunk is None:
            self._left.set()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Let the text end at its next token."""
        self._left.set()

    async def _next(self) -> Any:
        """The next chunk, or None at the end."""
        if self._left.is_set():
            return None
        try:
            chunk = await self._made.take()
        except asyncio.CancelledError:
            self._left.set()
            raise
        if isinstance(chunk, BaseException):
            self._left.set()
            raise chunk
        return chunk


class _Made:
    """Chunks on their way from a thread to a task."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` is called while there is no room; what it raises ends the stream."""
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Any] = asyncio.Queue()
        self._room = threading.Semaphore(MOST_UNREAD)

    async def take(self) -> Any:
        """In the task: the next chunk; at the end None or an error."""
        chunk = await self._chunks.get()
        self._room.release()
        return chunk

    def make(self, work: Callable[[], Any]) -> None:
        """In the thread: hand over the chunks that `work` gives."""
        try:
            for chunk in work():
                while not self._room.acquire(timeout=LOOK_SECONDS):
                    self._check()
                self._put(chunk)
            self._put(None)
        except _LeftError:
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, chunk: Any) -> None:
        self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
