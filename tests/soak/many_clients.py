"""Load a server with many clients; check answers and memory.

    python tests/soak/many_clients.py --minutes 5

Each client requests one completion after the other; a fifth of the streams is closed in the middle.
Each answer is compared with that of a `Llama` with the same settings. The exit status is 1 if an
answer is wrong, or if memory has grown by more than GROWTH_MIB after a fifth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import openai
from gguf import GGMLQuantizationType

from pyh2o import Llama

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from own_memory import own_bytes
from tiny_gguf import write_tiny_gguf

# Prefix cache and archives have limits that are not reached after a fifth of the time.
GROWTH_MIB = 16.0
SAMPLING = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1
}  # fmt: skip
CACHE: dict[str, Any] = {"n_ctx": 128, "slack": 16, "n_threads": 1, "n_threads_batch": 1}
N_REQUESTS, SHARE_LEAVING = 400, 0.2
SECONDS_BETWEEN_LOOKS = 1.0
NO_CONNECTION = 0


@dataclass(frozen=True)
class Asked:
    """One request; its client disconnects after this many chunks, or never."""

    prompt: str
    max_tokens: int
    seed: int
    leaves_after: int | None


def some_requests() -> list[Asked]:
    """Return requests of random lengths and prompts."""
    rng = random.Random(1)
    asked = []
    for seed in range(N_REQUESTS):
        words = [
            "".join(rng.choices("abcdefghijklmnopqrst", k=rng.randint(1, 8)))
            for _ in range(rng.randint(4, 20))
        ]
        n = rng.randint(2, 48)
        leaves_after = rng.randint(0, n // 2) if rng.random() < SHARE_LEAVING else None
        asked.append(Asked(" ".join(words), n, seed, leaves_after))
    return asked


class Load:
    """The clients: numbers of the sent requests, and texts of completed answers by index."""

    def __init__(self, address: str, pool: list[Asked], seconds: float) -> None:
        """Sample from these requests for `seconds`."""
        self.numbers: list[int] = []
        self.answers: dict[int, str] = {}
        self.statuses: Counter[int] = Counter()
        self._left = self._chosen(pool, seconds)
        self._client = openai.AsyncOpenAI(
            base_url=address, api_key="any", max_retries=0, timeout=3600
        )

    def _chosen(self, pool: list[Asked], seconds: float) -> Iterator[tuple[int, Asked]]:
        rng, end = random.Random(2), time.monotonic() + seconds
        while time.monotonic() < end:
            number = rng.randrange(len(pool))
            self.numbers.append(number)
            yield len(self.numbers) - 1, pool[number]

    async def run(self, n_clients: int) -> None:
        """Run the clients until the time is over."""
        await asyncio.gather(*(self._ask_all() for _ in range(n_clients)))

    async def _ask_all(self) -> None:
        for i, asked in self._left:
            while not await self._was_taken(i, asked):
                await asyncio.sleep(random.uniform(2, 10))

    async def _was_taken(self, i: int, asked: Asked) -> bool:
        try:
            text = await self._ask(asked)
        except openai.APIConnectionError:  # closed while idle
            self.statuses[NO_CONNECTION] += 1
            return False
        except openai.APIStatusError as error:
            self.statuses[error.status_code] += 1
            if error.status_code not in (429, 503):
                raise
            return False
        self.statuses[200] += 1
        if text is not None:
            self.answers[i] = text
        return True

    async def _ask(self, asked: Asked) -> str | None:
        """Return the answer, or None if the client disconnected."""
        chunks = await self._client.completions.create(
            model="any",
            prompt=asked.prompt,
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            stream=True,
            extra_body=SAMPLING,
        )
        text, n = "", 0
        async with chunks:
            async for chunk in chunks:
                if asked.leaves_after is not None and n >= asked.leaves_after:
                    return None
                text += chunk.choices[0].text
                n += 1
        return text


async def watched(load: Load, n_clients: int, pid: int) -> list[float]:
    """Run the load, print a line per minute, and return the server's MiB of memory over time."""
    used: list[float] = []

    async def look() -> None:
        started, minutes = time.monotonic(), 0
        while True:
            used.append(own_bytes(pid) / 2**20)
            if time.monotonic() >= started + 60 * (minutes + 1):
                minutes += 1
                line = f"{minutes} min: {used[-1]:.1f} MiB, {load.statuses[200]:,} requests"
                print(line, flush=True)
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    looking = asyncio.create_task(look())
    await load.run(n_clients)
    looking.cancel()
    return used


@contextmanager
def running_server(model: Path) -> Iterator[tuple[str, int]]:
    """Run a server in a separate process; yield its address and process ID."""
    command = [sys.executable, "-m", "pyh2o.cli", "serve", "--model", str(model), "--port", "0"]
    # small enough that texts are evicted and the prefix cache is full soon
    command += ["--texts", "8", "--store-mib", "4", "--ctx", str(CACHE["n_ctx"])]
    command += ["--slack", str(CACHE["slack"]), "--threads", "1"]
    # the installed package, not a folder of that name
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            address = next(found[0] for line in lines if (found := re.search(r"http\S+", line)))
            # the server logs rejected requests, and a full pipe would block it
            threading.Thread(target=deque, args=(lines, 0), daemon=True).start()
            yield address, process.pid
        finally:
            process.terminate()


def n_wrong(load: Load, pool: list[Asked], llm: Llama) -> int:
    """Return the number of answers that differ from those of the same request alone."""
    alone_: dict[int, str] = {}
    for i in load.answers:
        number = load.numbers[i]
        alone_[number] = alone_.get(number) or alone(pool[number], llm)
    return sum(text != alone_[load.numbers[i]] for i, text in load.answers.items())


def alone(asked: Asked, llm: Llama) -> str:
    """Return the answer to a request alone."""
    llm.reset()
    answer: Any = llm.create_completion(
        asked.prompt, max_tokens=asked.max_tokens, seed=asked.seed, **SAMPLING
    )
    return str(answer["choices"][0]["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=100)
    given = parser.parse_args()

    pool = some_requests()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # weights for which a batch gives the same bits as a single text
        model = write_tiny_gguf(
            Path(folder) / "tiny.gguf", seed=1, n_ctx_train=1024, dtype=GGMLQuantizationType.Q8_0
        )
        with running_server(model) as (address, pid):
            load = Load(address, pool, 60 * given.minutes)
            used = asyncio.run(watched(load, given.clients, pid))
        seconds = time.perf_counter() - started
        with Llama(str(model), **CACHE) as llm:
            wrong = n_wrong(load, pool, llm)

    tenth = max(1, len(used) // 10)
    means = [mean(used[i : i + tenth]) for i in range(0, len(used), tenth)]
    print(
        f"requests             {load.statuses[200]:,} answered in {seconds:,.0f} s, of them "
        f"{len(load.answers):,} to the end; statuses {dict(load.statuses)}\n"
        f"wrong answers        {wrong:,}\n"
        f"in each tenth, MiB   {' '.join(f'{one:.1f}' for one in means)}"
    )
    grown = mean(used[-tenth:]) - mean(used[2 * tenth : 3 * tenth] or used[-tenth:])
    if wrong or grown > GROWTH_MIB or not load.answers:
        sys.exit(1)


if __name__ == "__main__":
    main()
