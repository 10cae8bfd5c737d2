"""Measure more conversations than slots: tokens read again, and the first token after a move.

    python -m research.benchmarks.many_conversations book.txt --conversations 50 --turns 20

Conversations return in random order, each with its history, some new tokens of a book and a few
sampled tokens. "read again" counts tokens that were evaluated although an earlier turn had
evaluated them. The time to the first token includes finding a slot: one that still has the
conversation, or one restored from a snapshot.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from pyh2o.bench.rounds import Range
from pyh2o.compat.llama import Llama
from pyh2o.engine import Engine
from pyh2o.models import find_model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, help="long UTF-8 file")
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--new", type=int, default=32, help="new tokens per turn")
    parser.add_argument("-n", type=int, default=8, help="tokens sampled per turn")
    parser.add_argument("--store-mib", type=int, default=4096)
    arguments = parser.parse_args()

    rng = random.Random(1)
    turns = [i for i in range(arguments.conversations) for _ in range(arguments.turns)]
    rng.shuffle(turns)
    first_token: dict[bool, list[float]] = {False: [], True: []}
    n_again = 0
    with Engine(
        str(find_model(arguments.model)),
        texts=arguments.slots,
        store_mib=arguments.store_mib,
        n_ctx=8192,
    ) as engine:
        book = engine.model.tokenize(arguments.text.read_bytes(), add_bos=False)
        texts: list[list[int]] = [[] for _ in range(arguments.conversations)]
        for i in turns:
            n_evaluated = max(0, len(texts[i]) - 1)  # except the token sampled last
            start = rng.randrange(len(book) - arguments.new)
            texts[i] += book[start : start + arguments.new]
            before, moved = engine.batches.tokens, engine.stored.moved_in
            began = time.perf_counter()
            with engine.slot(texts[i]) as slot:
                prompt = list(texts[i])
                for token in Llama.of(slot.text).generate(prompt, temp=0.0):
                    if len(texts[i]) == len(prompt) and n_evaluated:
                        has_moved = engine.stored.moved_in > moved
                        first_token[has_moved].append(time.perf_counter() - began)
                    texts[i].append(token)
                    if len(texts[i]) == len(prompt) + arguments.n:
                        break
            n_needed = len(texts[i]) - 1 - n_evaluated
            n_again += engine.batches.tokens - before - n_needed
        stored = engine.stored
    print(f"tokens read again: {n_again:,} of {sum(map(len, texts)):,}")
    for has_moved, seconds in first_token.items():
        name = "moved back" if has_moved else "resident"
        times = [1000 * second for second in seconds]
        print(f"{name}: {len(times)} turns, first token {Range.of(times):.0f} ms")
    print(f"store: {stored.moved_out} out, {stored.moved_in} back, {stored.dropped} dropped")


if __name__ == "__main__":
    main()
