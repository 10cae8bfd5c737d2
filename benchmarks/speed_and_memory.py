"""Speed and memory at a long history: the fixed-size cache against llama.cpp's full cache.

    python benchmarks/speed_and_memory.py --history 6000

All caches read the same text in one process, on the same llama.cpp libraries; the full caches run
with eviction not attached. Then they generate in turns, round by round, so that a change in the
machine's speed meets them all. Reported are the median and the range of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from pyh2o import KVStatistics, Llama
from pyh2o.models import demo_model_path
from pyh2o.threads import physical_cores

CACHES: dict[str, dict[str, Any]] = {
    "full cache": {"evict": False},
    "full cache, flash attention": {"evict": False, "flash_attn": True},
    "20 % (10 % heavy + 10 % recent)": {"hh": 0.1, "recent": 0.1},
    "20 %, flash attention": {"hh": 0.1, "recent": 0.1, "flash_attn": True},
    "20 %, q8_0": {"hh": 0.1, "recent": 0.1, "type_k": 8, "type_v": 8},
}


@dataclass(frozen=True)
class Measurement:
    """One cache at one history length."""

    cache: str
    history: int  # tokens read before the measurement
    read_tokens_per_second: float
    tokens_per_second: list[float]  # of each round
    kv_bytes: int
    share_of_full: float  # of the bytes of a full cache of the same types
    compaction_share: float  # of the time of all rounds
    seconds_per_compaction: float

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)


def english_text() -> str:
    """A long text that every Python has: its own documentation."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def read(llm: Llama, tokens: list[int]) -> float:
    """Evaluate the tokens as a prompt; tokens per second."""
    start = time.perf_counter()
    llm.eval(tokens)
    return len(tokens) / (time.perf_counter() - start)


def generate(llm: Llama, tokens: list[int]) -> float:
    """Evaluate one token at a time, as generation does without sampling; tokens per second."""
    start = time.perf_counter()
    for token in tokens:
        llm.eval([token])
    return len(tokens) / (time.perf_counter() - start)


def measure(model: Path, *, history: int, rounds: int, n: int, threads: int) -> list[Measurement]:
    models = {
        name: Llama(
            str(model),
            n_ctx=8192,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **cache,
        )
        for name, cache in CACHES.items()
    }
    first = next(iter(models.values()))
    tokens = first.tokenize(english_text().encode())[: history + rounds * n]
    reading = {}
    for name, llm in models.items():
        reading[name] = read(llm, tokens[:history])
        print(f"{name}: read {history} tokens at {reading[name]:.0f}/s", file=sys.stderr)
    before: dict[str, KVStatistics] = {name: llm.kv for name, llm in models.items()}
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds):
        part = tokens[history + i * n : history + (i + 1) * n]
        for name, llm in models.items():
            speeds[name].append(generate(llm, part))
    return [
        _measurement(name, history, reading[name], speeds[name], n, before[name], llm.kv)
        for name, llm in models.items()
    ]


def _measurement(
    name: str,
    history: int,
    reading: float,
    speeds: list[float],
    n: int,
    before: KVStatistics,
    after: KVStatistics,
) -> Measurement:
    compacting = after.compaction_seconds - before.compaction_seconds
    return Measurement(
        cache=name,
        history=history,
        read_tokens_per_second=reading,
        tokens_per_second=speeds,
        kv_bytes=after.bytes_total,
        share_of_full=after.bytes_total / after.bytes_full,
        compaction_share=compacting / sum(n / speed for speed in speeds),
        seconds_per_compaction=compacting / max(1, after.compactions - before.compactions),
    )


def print_table(measurements: list[Measurement]) -> None:
    """Markdown, for docs/."""
    best_full = max(m.median for m in measurements if m.cache.startswith("full"))
    print(
        "| cache | KV memory | of full | read tok/s | generate tok/s (range) | x better full |"
        " compactions, share of time |"
    )
    print("|---|---|---|---|---|---|---|")
    for m in measurements:
        low, high = min(m.tokens_per_second), max(m.tokens_per_second)
        print(
            f"| {m.cache} | {m.kv_bytes / 2**20:.1f} MiB | {m.share_of_full:.1%} "
            f"| {m.read_tokens_per_second:.0f} | {m.median:.1f} ({low:.1f}-{high:.1f}) "
            f"| {m.median / best_full:.2f} | {m.compaction_share:.2%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--history", type=int, default=6000, help="tokens read first")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every cache")
    parser.add_argument("-n", type=int, default=160, help="tokens generated in each turn")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    arguments = parser.parse_args()
    measurements = measure(
        arguments.model or demo_model_path(),
        history=arguments.history,
        rounds=arguments.rounds,
        n=arguments.n,
        threads=arguments.threads,
    )
    print_table(measurements)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(m) for m in measurements], indent=1))


if __name__ == "__main__":
    main()
