"""How fast a text is written beside programs that keep cores busy.

    python -m research.benchmarks.beside_others --others 0,1,2

All numbers of threads and of other programs, each of which computes without end, take turns. Before
a turn is timed a second of text is written, in which the number of threads that compute may fall.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from pyh2o import Llama

from .common import median_and_range, open_model, parser_of

SETTLE = 1.0
"""Seconds before a turn is timed."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--others", default="0,1", help="busy programs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=200, help="tokens of a turn")
    arguments = parser.parse_args()
    others = [int(n) for n in arguments.others.split(",")]

    models: dict[int, Llama] = {}
    for n in sorted({1, arguments.threads}):
        arguments.threads = n
        models[n] = open_model(arguments)
    speeds: dict[tuple[int, int], list[float]] = {key: [] for key in product(others, models)}
    for _ in range(arguments.rounds):
        for n_others, n_threads in speeds:
            with busy(n_others):
                speeds[n_others, n_threads].append(speed(models[n_threads], arguments.n))
    print("| busy programs | threads | tokens/s (range) |")
    print("|---:|---:|---:|")
    for (n_others, n_threads), of_turns in speeds.items():
        print(f"| {n_others} | {n_threads} | {median_and_range(of_turns, '.0f', 'tok/s')} |")


def speed(llm: Llama, n: int) -> float:
    """Tokens per second of a new text, written one by one."""
    llm.reset()
    begun = time.perf_counter()
    while time.perf_counter() < begun + SETTLE:
        llm.eval([100])
    begun = time.perf_counter()
    for token in range(100, 100 + n):
        llm.eval([token])
    return n / (time.perf_counter() - begun)


@contextmanager
def busy(n: int) -> Iterator[None]:
    """While so many programs compute."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


if __name__ == "__main__":
    main()
