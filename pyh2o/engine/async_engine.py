"""The engine for asyncio: each text in a thread of its own, awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
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
        return await self._run(
            lambda made: made.create_completion(prompt, stream=stream, **arguments),
            *(priority, wait_seconds, stream),
        )

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
        return await self._run(
            lambda made: made.create_chat_completion(messages, stream=stream, **arguments),
            *(priority, wait_seconds, stream),
        )

    async def _run(
        self,
        work: Callable[[Completions], Any],
        priority: int,
        wait_seconds: float | None,
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
        if not stream:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._threads, work, completions)
            except asyncio.CancelledError:
                left.set()
                raise
        chunks = _chunks(self._threads, lambda: work(completions), check, left)
        # what is wrong with a request is raised here
        return _from_first(await anext(chunks, None), chunks)


class _LeftError(Exception):
    """Nobody awaits the text any more."""


async def _from_first(first: Any, chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    try:
        if first is not None:
            yield first
        async for chunk in chunks:
            yield chunk
    finally:
        await chunks.aclose()


async def _chunks(
    threads: ThreadPoolExecutor,
    work: Callable[[], Any],
    check: Callable[[], None],
    left: threading.Event,
) -> AsyncGenerator[Any, None]:
    """What a thread makes. Its text ends at the next token once this is closed."""
    loop = asyncio.get_running_loop()
    made: asyncio.Queue[Any] = asyncio.Queue()  # chunks; at the end None or an error
    room = threading.Semaphore(MOST_UNREAD)

    def put(chunk: Any) -> None:
        loop.call_soon_threadsafe(made.put_nowait, chunk)

    def make() -> None:
        try:
            for chunk in work():
                while not room.acquire(timeout=LOOK_SECONDS):
                    check()
                put(chunk)
            put(None)
        except _LeftError:
            put(None)
        except BaseException as error:
            put(error)

    threads.submit(make)
    try:
        while (chunk := await made.get()) is not None:
            room.release()
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk
    finally:
        left.set()
