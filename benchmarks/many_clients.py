"""A load of many clients on a server: answers, those that leave, those turned away, and memory.

    pip install '.[server]' openai
    python benchmarks/many_clients.py book.txt --clients 100 --requests 2000

Each client asks for one completion after the other, with a prompt, a length and a seed of its own;
a fifth of the streams is left in the middle. Who is turned away asks again. Then each request that
was answered is made once more, alone, by a `Llama` with the same settings.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from pyh2o import Llama
from pyh2o.models import find_model
from pyh2o.system.memory import own_bytes

SAMPLING = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1
}  # fmt: skip
SECONDS_BETWEEN_LOOKS = 2.0
NO_CONNECTION = 0


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        prompt: a piece of the book.
        max_tokens: of the answer.
        seed: of its random numbers.
        leaves_after: chunks after which its client leaves; None for one that stays.
    """

    prompt: str
    max_tokens: int
    seed: int
    leaves_after: int | None


def requests_of(book: str, arguments: argparse.Namespace) -> list[Asked]:
    """As many requests as `arguments` says, of random lengths."""
    rng = random.Random(arguments.seed)
    words = book.split()
    asked = []
    for i in range(arguments.requests):
        n_words = rng.randint(4, arguments.words)
        start = rng.randrange(len(words) - n_words)
        n = rng.randint(2, arguments.n)
        leaves_after = rng.randint(0, n // 2) if rng.random() < arguments.leaving else None
        asked.append(Asked(" ".join(words[start : start + n_words]), n, i, leaves_after))
    return asked


class Load:
    """What the clients get.

    Attributes:
        answers: text of each request that was answered, by its number.
        statuses: how often each status was the answer; NO_CONNECTION for none.
    """

    def __init__(self, address: str, asked: Iterable[Asked]) -> None:
        self.answers: dict[int, str] = {}
        self.statuses: Counter[int] = Counter()
        self._left = iter(enumerate(asked))
        self._client = openai.AsyncOpenAI(
            base_url=address, api_key="any", max_retries=0, timeout=3600
        )

    async def run(self, n_clients: int) -> None:
        """Let so many clients ask until all requests were made."""
        await asyncio.gather(*(self._ask_all() for _ in range(n_clients)))

    async def _ask_all(self) -> None:
        for i, asked in self._left:
            while not await self._was_taken(i, asked):
                await asyncio.sleep(random.uniform(2, 10))

    async def _was_taken(self, i: int, asked: Asked) -> bool:
        try:
            text = await self._ask(asked)
        except openai.APIConnectionError:  # it was closed just when it was used again
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
        """The answer; None if its client left."""
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
    """Run the load; MiB of memory that the server had meanwhile."""
    used: list[float] = []

    async def look() -> None:
        while True:
            used.append(own_bytes(pid) / 2**20)
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    looking = asyncio.create_task(look())
    await load.run(n_clients)
    looking.cancel()
    return used


@contextmanager
def running_server(model: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address and its process id."""
    command = [sys.executable, "-m", "pyh2o.cli", "serve", "--model", str(model), "--port", "0"]
    command += ["--texts", str(arguments.texts), "--store-mib", str(arguments.store_mib)]
    command += ["--ctx", str(arguments.window), "--slack", str(arguments.slack)]
    if arguments.recall is not None:
        command += ["--recall", str(arguments.recall)]
    if arguments.threads:
        command += ["--threads", str(arguments.threads)]
    # the installed package, and not a folder of its name where this was called
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            address = next(found[0] for line in lines if (found := re.search(r"http\S+", line)))
            # whom it turns away is told there, too, and somebody has to read it
            threading.Thread(target=deque, args=(lines, 0), daemon=True).start()
            yield address, process.pid
        finally:
            process.terminate()


def n_alike(answers: dict[int, str], asked: list[Asked], llm: Llama) -> int:
    """How many of the answers are what the request gets alone."""
    return sum(alone(asked[i], llm) == text for i, text in answers.items())


def alone(asked: Asked, llm: Llama) -> str:
    """What a request gets from a model that has nothing else to do."""
    llm.reset()
    answer: Any = llm.create_completion(
        asked.prompt, max_tokens=asked.max_tokens, seed=asked.seed, **SAMPLING
    )
    return str(answer["choices"][0]["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, help="UTF-8 file that is long enough")
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--leaving", type=float, default=0.2, help="share that leaves")
    parser.add_argument("--texts", type=int, default=8, help="places of the server")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--slack", type=int, default=16)
    parser.add_argument("--recall", type=float, default=None, help="default: as serve has it")
    parser.add_argument("--store-mib", type=int, default=64)
    parser.add_argument("--threads", type=int, help="of the server; default: as serve has it")
    parser.add_argument("--words", type=int, default=45, help="most words of a prompt")
    parser.add_argument("-n", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    model = find_model(arguments.model)
    asked = requests_of(arguments.text.read_text(encoding="utf-8"), arguments)
    started = time.perf_counter()
    with running_server(model, arguments) as (address, pid), suppress(KeyboardInterrupt):
        load = Load(address, asked)
        used = asyncio.run(watched(load, arguments.clients, pid))
    seconds = time.perf_counter() - started
    tenth = max(1, len(used) // 10)
    print(f"{len(asked):,} requests of {arguments.clients} clients in {seconds:,.0f} s")
    print(f"statuses: {dict(load.statuses)}; answered to the end: {len(load.answers):,}")
    means = [statistics.mean(used[i : i + tenth]) for i in range(0, len(used), tenth)]
    print(f"memory in each tenth of the time: {' '.join(f'{mean:.1f}' for mean in means)} MiB")
    with Llama(
        str(model), n_ctx=arguments.window, slack=arguments.slack, recall=arguments.recall
    ) as llm:
        n = n_alike(load.answers, asked, llm)
    print(f"as alone: {n:,} of {len(load.answers):,}")


if __name__ == "__main__":
    main()
