"""Measure how fast a long prompt is read by type of the weights, against OpenVINO GenAI.

    python -m research.speed.long_prompt model-Q4_0.gguf model-Q8_0.gguf

The files are one model in several types. Each has four caches: this runtime's with exact attention
and with attention in bf16, OpenVINO's full one and OpenVINO's with its own eviction to the same
number of tokens. All caches of all files are interleaved, a process each: read the prompt, then
generate.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from pyh2o.bench.process import Cache, CacheFailedError, Measurement, Worker
from pyh2o.bench.rounds import Range, interleaved
from pyh2o.cache.statistics import mib_text

from ..eval.arguments import say
from ..eval.caches import Compute
from ..eval.model import english_text, repeated_tokens
from .caches import Comparison, caches_to_compare
from .openvino import check_packages


class Reader:
    """A cache of a file, and its measurements."""

    def __init__(self, model: Path, cache: Cache, tokens: tuple[int, ...]) -> None:
        self.name = f"{model.name} | {cache.name}"
        self.worker = Worker(cache, model, tokens)
        self.reading: list[float] = []
        self.generating: list[float] = []
        self.read: Measurement | None = None

    def turn(self, tokens: int, n: int) -> None:
        """Read a prompt and generate `n` tokens."""
        self.worker.ask("reset")
        self.read = self.worker.ask("end", tokens)
        self.reading.append(self.read.seconds)
        self.generating.append(self.worker.ask("generate", n).seconds)
        say(f"{self.name}: {tokens / self.reading[-1]:.0f} and {n / self.generating[-1]:.1f} tok/s")

    def row(self, tokens: int, n: int) -> str:
        """Return the line of the table."""
        assert self.read is not None
        pairs = zip(self.reading, self.generating, strict=True)
        return (
            f"| {self.name} | {mib_text(self.read.use.bytes_kv)} MiB "
            f"| {self.read.peak_bytes / 2**20:.0f} "
            f"| {Range.of([tokens / seconds for seconds in self.reading]):.0f} "
            f"| {Range.of([a + b / n for a, b in pairs]):.1f} "
            f"| {Range.of([n / seconds for seconds in self.generating]):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--ctx", type=int, default=8192, help="the window in tokens")
    parser.add_argument("--history", type=int, default=7900, help="tokens of the prompt")
    parser.add_argument("--budget", type=float, default=0.2, help="a fraction of the window")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("-n", type=int, default=64, help="tokens to generate")
    given = parser.parse_args()
    check_packages()

    readers = []
    for model in given.models:
        tokens = repeated_tokens(model, english_text(), given.history + given.n)
        for cache in caches_of(model, given):
            try:
                readers.append(Reader(model, cache, tokens))
            except CacheFailedError as error:
                print(f"{model.name}, {cache.name}: {error}\n")
    for reader in interleaved(readers, given.rounds):
        reader.turn(given.history, given.n)
    print("| file | cache | KV memory | peak MiB | read tok/s | first token s | generate tok/s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for reader in readers:
        print(reader.row(given.history, given.n))
        reader.worker.close()


def caches_of(model: Path, given: argparse.Namespace) -> list[Cache]:
    """Return the caches of a file: ours, exact and with bf16 products, and OpenVINO's."""
    asked = Comparison(
        model=model,
        window=given.ctx,
        compute=Compute(given.threads),
        histories=(given.history,),
        budgets=(given.budget,),
        recalls=(0,),
        kv_types=("f16",),
        rounds=1,
        n=given.n,
        other="openvino",
    )
    ours, *rest = [
        one for one in caches_to_compare(asked) if not one.name.startswith(("full", "sinks"))
    ]
    rounding = {**ours.settings, "attention": "avx512bf16"}
    return [ours, replace(ours, name=f"{ours.name}, attention in bf16", settings=rounding), *rest]


if __name__ == "__main__":
    main()
