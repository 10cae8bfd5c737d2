"""Measure generation speed while other programs keep cores busy.

    python -m research.benchmarks.loaded_machine --others 0,1,2

All numbers of threads and of other programs, each of which uses a core without end, are
interleaved. Before each measurement the model generates for a second, in which the number of
threads can fall.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import product

from pyh2o.bench.process import Cache, Worker
from pyh2o.bench.rounds import Range, interleaved
from pyh2o.models import find_model

from .common import parser_of, settings_of

SETTLE = 1.0
"""Seconds before a measurement."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--others", default="0,1", help="busy programs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=200, help="tokens of a measurement")
    arguments = parser.parse_args()
    others = [int(n) for n in arguments.others.split(",")]

    model, tokens = find_model(arguments.model), [*range(100, 300)] * 100
    workers: dict[int, Worker] = {}
    with ExitStack() as stack:
        for n in sorted({1, arguments.threads}):
            arguments.threads = n
            cache = Cache(f"{n} threads", settings_of(arguments))
            workers[n] = stack.enter_context(closing(Worker(cache, model, tokens)))
        speeds: dict[tuple[int, int], list[float]] = {key: [] for key in product(others, workers)}
        for key in interleaved(list(speeds), arguments.rounds):
            with busy(key[0]):
                speeds[key].append(speed(workers[key[1]], arguments.n))
    print("| busy programs | threads | tokens/s (range) |")
    print("|---:|---:|---:|")
    for (n_others, n_threads), measured in speeds.items():
        print(f"| {n_others} | {n_threads} | {Range.of(measured):.0f} |")


def speed(worker: Worker, n: int) -> float:
    """Return tokens per second of a new text, generated one by one."""
    worker.ask("reset")
    started = time.perf_counter()
    while time.perf_counter() < started + SETTLE:
        worker.ask("generate", 16)
    return n / worker.ask("generate", n).seconds


@contextmanager
def busy(n: int) -> Iterator[None]:
    """Run `n` programs that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


if __name__ == "__main__":
    main()
