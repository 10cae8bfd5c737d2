"""How fast a long prompt is read, by type of the weights: this cache beside OpenVINO GenAI.

    python -m research.benchmarks.long_prompt model-Q4_0.gguf model-Q8_0.gguf

The files are one model in several types. Each has four caches: this runtime's with exact attention
and with attention in bf16, OpenVINO's full one and OpenVINO's with its own eviction at as many
tokens. All of all files take turns, each in a process of its own as with `pyh2o bench`: to read the
whole prompt, then to generate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pyh2o.cache.statistics import mib_text
from research.eval.caches import Compute, MeasuredCache
from research.eval.model import english_text, read_model, repeated_tokens
from research.speed.caches import BenchSettings, caches_to_compare
from research.speed.comparison import PAUSE
from research.speed.figures import Range
from research.speed.messages import Done, Generate, GoBack, Read, Start
from research.speed.openvino_worker import check_packages
from research.speed.process import CacheFailedError, WorkerProcess
from research.speed.turns import generating_turns


class Player:
    """A cache of a file, and what was measured of it."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.worker = WorkerProcess(start)
        self.reading: list[float] = []
        self.generating: list[float] = []
        self.read: Done | None = None

    def turn(self, tokens: int, n: int) -> None:
        """Read so many tokens and generate `n`."""
        self.worker.ask(GoBack(0))
        time.sleep(PAUSE)
        self.read = self.worker.ask(Read(tokens, last=True))
        self.reading.append(self.read.seconds)
        time.sleep(PAUSE)
        self.generating.append(self.worker.ask(Generate(n)).seconds)
        name = f"{self.start.model.name}, {self.start.cache.name}"
        speeds = f"{tokens / self.reading[-1]:.0f} and {n / self.generating[-1]:.1f} tok/s"
        print(f"{name}: {speeds}", file=sys.stderr, flush=True)

    def row(self, tokens: int, n: int) -> str:
        """The line of the table."""
        assert self.read is not None
        cells = [
            self.start.model.name,
            self.start.cache.name,
            f"{mib_text(self.read.after.bytes_total)} MiB",
            f"{self.read.peak_bytes / 2**20:.0f}",
            format(range_of(tokens / seconds for seconds in self.reading), ".0f"),
            format(
                range_of(a + b / n for a, b in zip(self.reading, self.generating, strict=True)),
                ".1f",
            ),
            format(range_of(n / seconds for seconds in self.generating), ".1f"),
        ]
        return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--ctx", type=int, default=8192, help="the window in tokens")
    parser.add_argument("--history", type=int, default=7900, help="tokens of the prompt")
    parser.add_argument("--budget", type=float, default=0.2, help="a fraction of the window")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    arguments = parser.parse_args()
    check_packages()

    players = []
    for model in arguments.models:
        for start in starts(model, arguments):
            try:
                players.append(Player(start))
            except CacheFailedError as error:
                print(f"{model.name}, {error}\n")
    for _, index in generating_turns(len(players), arguments.rounds):
        players[index].turn(arguments.history, arguments.n)
    print("| file | cache | KV memory | peak MiB | read tok/s | first token s | generate tok/s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for player in players:
        print(player.row(arguments.history, arguments.n))
        player.worker.close()


def starts(model: Path, arguments: argparse.Namespace) -> list[Start]:
    """The caches of a file: ours, which is exact or multiplies in bf16, and OpenVINO's."""
    settings = BenchSettings(
        model=model,
        window=arguments.ctx,
        compute=Compute(threads=arguments.threads),
        histories=(arguments.history,),
        budgets=(arguments.budget,),
        kv_types=("f16",),
        rounds=1,
        n=arguments.n,
        openvino=True,
    )
    caches = caches_to_compare(settings, read_model(model).n_ctx_train)
    tokens = repeated_tokens(model, english_text(), settings.text_tokens)
    found = [
        Start(cache, model, settings.window, settings.compute, tokens)
        for cache in caches
        if is_shown(cache)
    ]
    ours = found[0]
    rounding = replace(ours.compute, attention="avx512bf16")
    named = replace(ours.cache, name=f"{ours.cache.name}, attention in bf16")
    return [ours, replace(ours, cache=named, compute=rounding), *found[1:]]


def range_of(values: Iterable[float]) -> Range:
    found = list(values)
    return Range(statistics.median(found), min(found), max(found))


def is_shown(cache: MeasuredCache) -> bool:
    return cache.kind == "openvino" or (cache.kind == "evicting" and not cache.is_streaming)


if __name__ == "__main__":
    main()
