"""How long it takes to give the rows of a cache new positions, by the type of the rows.

    python -m research.benchmarks.random_model heads-of-7b heads-of-7b.gguf --context 4096
    python -m research.benchmarks.rebase_time heads-of-7b.gguf

The model has as many layers, heads and elements as Llama 2 7B, and little else; a fifth of its
4,096 positions are rows. The text is random tokens: how long it takes does not depend on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from pyh2o import Llama
from pyh2o.llama.arguments import KV_TYPES

from .common import median_and_range


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=819)
    parser.add_argument("--kv-type", default="f16,q8_0,q4_0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    print("| rows are | median (range) |")
    print("|---|---:|")
    for kv_type in arguments.kv_type.split(","):
        with Llama(
            str(arguments.model),
            n_ctx=4096,
            hh=arguments.rows // 2,
            recent=arguments.rows // 2,
            type_k=KV_TYPES[kv_type],
            type_v=KV_TYPES[kv_type],
            recall=0,
            n_threads=arguments.threads,
            n_threads_batch=arguments.threads,
            verbose=False,
        ) as llm:
            took = median_and_range(rebases(llm, arguments.rounds), ".0f", "ms")
        print(f"| {kv_type} | {took} |", flush=True)


def rebases(llm: Llama, n: int) -> list[float]:
    """Milliseconds of each of the first ones of a text."""
    rng = np.random.default_rng(0)
    times: list[float] = []
    while len(times) < n:
        before = llm.kv
        llm.eval(rng.integers(0, llm.n_vocab(), 256).tolist())
        if llm.kv.rebases > before.rebases:
            times.append(1000 * (llm.kv.rebase_seconds - before.rebase_seconds))
    return times


if __name__ == "__main__":
    main()
