"""The engine in asyncio: results, streams, errors, and tasks that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pyh2o.engine import AsyncEngine
from pyh2o.errors import ClosedError
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tiny_llama import EXACT_ROWS, ONE_THREAD, PAPER, tiny_llama

SETTINGS: dict[str, Any] = {
    "hh": 24,
    "recent": 16,
    "slack": 12,
    "n_ctx": 256,
    **PAPER,
    "attention": "ops",
    **EXACT_ROWS,
}
MESSAGES = [{"role": "user", "content": "Hello?"}]
NO_END = {"logit_bias": {2: -100.0}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("engine") / "tiny.gguf", seed=11, chat_template=CHAT_TEMPLATE
    )


def run(path: Path, work: Callable[[AsyncEngine], Awaitable[None]], texts: int = 3) -> None:
    async def main() -> None:
        async with AsyncEngine(str(path), texts=texts, **ONE_THREAD, **SETTINGS) as engine:
            await work(engine)
            await until(lambda: engine.engine.n_running == 0)

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_results_and_streams_are_those_of_the_class(path: Path) -> None:
    prompts = [f"{n} and {n * 7} make" for n in range(8)]
    how = {"max_tokens": 30, "temperature": 0.0}
    with tiny_llama(path, **SETTINGS) as alone:
        expected = [alone.create_completion(p, **how)["choices"][0]["text"] for p in prompts]
        answer = alone.create_chat_completion(MESSAGES, **how)["choices"][0]["message"]["content"]

    async def work(engine: AsyncEngine) -> None:
        async def stream(prompt: str) -> str:
            chunks = await engine.create_completion(prompt, stream=True, **how)
            return "".join([chunk["choices"][0]["text"] async for chunk in chunks])

        results = await asyncio.gather(*(engine.create_completion(p, **how) for p in prompts))
        assert [result["choices"][0]["text"] for result in results] == expected
        assert await asyncio.gather(*(stream(prompt) for prompt in prompts)) == expected
        chat = await engine.create_chat_completion(MESSAGES, **how)
        assert chat["choices"][0]["message"]["content"] == answer

    run(path, work)


def test_what_is_wrong_is_raised_at_once(path: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="logit_bias names token 9999"):
            await engine.create_completion("once", stream=True, logit_bias={9999: 1.0})
        with pytest.raises(ValueError, match="logit_bias names token 9999"):
            await engine.create_completion("once", logit_bias={9999: 1.0})

    run(path, work)


def test_a_cancelled_task_frees_its_place(path: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        endless = {"max_tokens": -1, **NO_END}
        task = asyncio.create_task(engine.create_completion("once", **endless))
        await until(lambda: engine.engine.n_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.engine.n_running == 0)
        chunks = await engine.create_completion("once", stream=True, **endless)
        async for _ in chunks:
            break
        await chunks.aclose()
        await until(lambda: engine.engine.n_running == 0)
        async for _ in await engine.create_completion("once", stream=True, **endless):
            break
        await until(lambda: engine.engine.n_running == 0)

    run(path, work, texts=1)


@pytest.mark.parametrize("reads", [True, False])
def test_who_awaits_a_text_is_told_that_the_engine_was_closed(path: Path, *, reads: bool) -> None:
    endless = {"max_tokens": -1, **NO_END}

    async def work(engine: AsyncEngine) -> None:
        chunks = await engine.create_completion("once", stream=True, **endless)

        async def read() -> None:
            async for _ in chunks:
                pass

        waiting = asyncio.create_task(engine.create_completion("twice", **endless))
        await until(lambda: engine.engine.n_waiting == 1)
        if not reads:
            await engine.close()
        reading = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        if reads:
            await engine.close()
        for task in (reading, waiting):
            with pytest.raises(ClosedError, match="closed"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(ClosedError, match="closed"):
            await engine.create_completion("thrice")

    run(path, work, texts=1)
