"""How long a compaction takes, by policy and threads.

    python -m research.benchmarks.compaction_time model.gguf --ctx 8192 --hh 0.1 --recent 0.1

The text is random tokens: how long a choice takes depends on the number of rows, hardly on them.
`research.benchmarks.random_model heads-of-7b` makes a small model with the heads of Llama 2 7B.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pyh2o import Llama

from .common import median_and_range


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=8192, help="the window in tokens")
    parser.add_argument("--hh", type=float, default=0.1)
    parser.add_argument("--recent", type=float, default=0.1)
    parser.add_argument("--policy", default="h2o-far,h2o")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    threads = [int(n) for n in arguments.threads.split(",")]
    print("| policy | threads | rows | tokens between two | median (range) |")
    print("|---|---:|---:|---:|---:|")
    for policy in arguments.policy.split(","):
        llm = Llama(
            str(arguments.model),
            n_ctx=arguments.ctx,
            hh=arguments.hh,
            recent=arguments.recent,
            policy=policy,
            recall=0,
            verbose=False,
        )
        rng = np.random.default_rng(0)
        read(llm, rng, llm.kv.capacity)
        times: dict[int, list[float]] = {n: [] for n in threads}
        for _ in range(arguments.rounds):
            for n in threads:
                llm._ctx.set_n_threads(n, n)
                before = llm.kv
                read(llm, rng, before.slack)
                count = llm.kv.compactions - before.compactions
                seconds = llm.kv.compaction_seconds - before.compaction_seconds
                times[n].append(1000 * seconds / count)
        rows = llm.kv.capacity * sum(len(llm.kv_rows(layer)[0]) for layer in range(n_layers(llm)))
        for n, of_threads in times.items():
            took = median_and_range(of_threads, ".1f", "ms")
            print(f"| {policy} | {n} | {rows:,} | {llm.kv.slack} | {took} |", flush=True)
        llm.close()


def read(llm: Llama, rng: np.random.Generator, n: int) -> None:
    tokens: npt.NDArray[np.int64] = rng.integers(0, llm.n_vocab(), n)
    llm.eval(tokens.tolist())


def n_layers(llm: Llama) -> int:
    return int(llm.metadata["llama.block_count"])


if __name__ == "__main__":
    main()
