"""A server under load for a while: every answer has to be right, and memory may not grow.

    pip install '.[server]' openai gguf
    python benchmarks/soak.py --minutes 5

A hundred clients ask a tiny random model for completions, as in `many_clients.py`, until the time
is over; a fifth of the streams is left in the middle. They draw their requests from some hundreds,
and each answer is compared with what its request gets alone. Memory is told every minute. The exit
status is 1 if an answer is wrong, or if memory has grown by more than GROWTH_MIB since a fifth of
the time had passed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from gguf import GGMLQuantizationType
from many_clients import Asked, Load, alone, requests_of, running_server

from pyh2o import Llama
from pyh2o.system.memory import own_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from tiny_gguf import write_tiny_gguf

# What is kept of texts for those that go on has limits, but is not full by then.
GROWTH_MIB = 16.0
SECONDS_BETWEEN_LOOKS = 1.0
# So small that texts are evicted, and that the store is full soon.
SERVER: dict[str, Any] = {
    "texts": 8, "window": 128, "slack": 16, "recall": None, "store_mib": 4, "threads": 1
}  # fmt: skip
# Of the requests; see `many_clients.py`.
REQUESTS = {"requests": 400, "words": 20, "n": 48, "leaving": 0.2, "seed": 1}


class Choices:
    """Requests of a pool, one after the other until the time is over.

    Attributes:
        numbers: of those that were chosen, in that order.
    """

    def __init__(self, pool: list[Asked], seconds: float) -> None:
        self.numbers: list[int] = []
        self._pool = pool
        self._seconds = seconds

    def __iter__(self) -> Iterator[Asked]:
        rng, end = random.Random(2), time.monotonic() + self._seconds
        while time.monotonic() < end:
            self.numbers.append(rng.randrange(len(self._pool)))
            yield self._pool[self.numbers[-1]]


async def watched(load: Load, n_clients: int, pid: int) -> list[float]:
    """Run the load, and say every minute how it goes; MiB of memory that the server had."""
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


def n_wrong(load: Load, choices: Choices, pool: list[Asked], llm: Llama) -> int:
    """How many answers are not what their request gets alone."""
    texts = {number: alone(pool[number], llm) for number in set(choices.numbers)}
    return sum(text != texts[choices.numbers[i]] for i, text in load.answers.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=100)
    arguments = parser.parse_args()

    rng = random.Random(3)
    book = " ".join(
        "".join(rng.choices("abcdefghijklmnopqrst", k=rng.randint(1, 8))) for _ in range(5000)
    )
    pool = requests_of(book, argparse.Namespace(**REQUESTS))
    with tempfile.TemporaryDirectory() as folder:
        # weights of which texts among others get the same bits as alone
        model = write_tiny_gguf(
            Path(folder) / "tiny.gguf", seed=1, n_ctx_train=1024, dtype=GGMLQuantizationType.Q8_0
        )
        choices = Choices(pool, 60 * arguments.minutes)
        with running_server(model, argparse.Namespace(**SERVER)) as (address, pid):
            load = Load(address, choices)
            used = asyncio.run(watched(load, arguments.clients, pid))
        sizes = {name: SERVER[name] for name in ("slack", "recall")}
        with Llama(
            str(model), n_ctx=SERVER["window"], n_threads=1, n_threads_batch=1, **sizes
        ) as llm:
            wrong = n_wrong(load, choices, pool, llm)

    tenth = max(1, len(used) // 10)
    before, after = mean(used[2 * tenth : 3 * tenth]), mean(used[-tenth:])
    print(
        f"requests             {load.statuses[200]:,} answered, of them {len(load.answers):,} to "
        f"the end; statuses {dict(load.statuses)}\n"
        f"wrong answers        {wrong:,}\n"
        f"after a fifth        {before:.1f} MiB\n"
        f"at the end           {after:.1f} MiB"
    )
    if wrong or after - before > GROWTH_MIB or not load.answers:
        sys.exit(1)


if __name__ == "__main__":
    main()
