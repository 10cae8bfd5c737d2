"""Measure how long compactions and re-bases take.

    python -m research.benchmarks.upkeep compactions model.gguf --ctx 8192
    python -m research.benchmarks.random_model heads-of-7b heads-of-7b.gguf --context 4096
    python -m research.benchmarks.upkeep rebases heads-of-7b.gguf --ctx 4096 --kv-type f16,q8_0,q4_0

The text is random tokens: selection time depends on the number of rows, hardly on their content.
"heads-of-7b" has the layers and heads of Llama 2 7B, and little else. Only the first re-bases of a
text are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from pyh2o import Llama
from pyh2o.bench.rounds import Range
from pyh2o.core.parameters import KV_TYPES


def compactions(llm: Llama, n: int) -> Iterator[float]:
    """Return the milliseconds of each of `n` compactions, one for each slack."""
    read(llm, llm.kv.capacity - llm.n_tokens)
    for _ in range(n):
        before = llm.kv
        read(llm, before.slack)
        spent = llm.kv.compaction_seconds - before.compaction_seconds
        yield 1000 * spent / (llm.kv.compactions - before.compactions)


def rebases(llm: Llama, n: int) -> Iterator[float]:
    """Return the milliseconds of each of `n` re-bases."""
    while n:
        before = llm.kv
        read(llm, 256)
        if llm.kv.rebases > before.rebases:
            n -= 1
            yield 1000 * (llm.kv.rebase_seconds - before.rebase_seconds)


def read(llm: Llama, n: int) -> None:
    """Read random tokens."""
    rng = np.random.default_rng(llm.n_tokens)
    llm.eval(rng.integers(0, llm.n_vocab(), n).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("compactions", "rebases"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--ctx", type=int, default=8192, help="the window in tokens")
    parser.add_argument("--hh", type=float, default=0.1)
    parser.add_argument("--recent", type=float, default=0.1)
    parser.add_argument("--policy", default="h2o-far,h2o")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()

    print("| policy | row type | threads | rows | tokens between two | median (range) |")
    print("|---|---|---:|---:|---:|---:|")
    lists = (given.policy.split(","), given.kv_type.split(","), map(int, given.threads.split(",")))
    for policy, kv_type, threads in product(*lists):
        with Llama(
            str(given.model),
            n_ctx=given.ctx,
            hh=given.hh,
            recent=given.recent,
            policy=policy,
            type_k=KV_TYPES[kv_type],
            type_v=KV_TYPES[kv_type],
            recall=0,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        ) as llm:
            measure = compactions if given.what == "compactions" else rebases
            took = Range.of([*measure(llm, given.rounds)])
            n_pairs = sum(len(llm.kv_rows(i)[0]) for i in range(n_layers(llm)))
            rows = f"{llm.kv.capacity * n_pairs:,}"
            print(
                f"| {policy} | {kv_type} | {threads} | {rows} | {llm.kv.slack} | {took:.1f} ms |",
                flush=True,
            )


def n_layers(llm: Llama) -> int:
    """Return the layers of a model that attends in all of them."""
    return int(llm.metadata["llama.block_count"])


if __name__ == "__main__":
    main()
