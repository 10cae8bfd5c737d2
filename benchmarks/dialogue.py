"""A long dialogue: the time to the first token must not grow with the turns.

    python benchmarks/dialogue.py --turns 200

Every turn asks a question of the same number of tokens. Reported are the time to the first piece of
text around turn 20 and at the end, as medians of eleven turns, and the tokens that were evaluated
against those that were new.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from pyh2o import Conversation, Llama
from pyh2o.generation.sampling import Sampling
from pyh2o.models import demo_model_path
from pyh2o.system.threads import physical_cores

QUESTION = (
    "This is question {:03d}: what would you like to tell me about the sea, the town and you?"
)
AROUND = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--rows", type=int, default=1024, help="half heavy, half recent")
    parser.add_argument("--threads", type=int, default=physical_cores())
    arguments = parser.parse_args()

    llm = Llama(
        str(arguments.model or demo_model_path()),
        hh=arguments.rows // 2,
        recent=arguments.rows - arguments.rows // 2,
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
        verbose=False,
    )
    conversation = Conversation(llm, system="You are a friendly sailor.", sampling=Sampling(seed=7))
    waits: list[float] = []
    for turn in range(1, arguments.turns + 1):
        start = time.perf_counter()
        first = None
        for _ in conversation.say(QUESTION.format(turn), max_tokens=arguments.max_tokens):
            first = first or time.perf_counter() - start
        waits.append(first or time.perf_counter() - start)
        if turn % 20 == 0:
            print(
                f"turn {turn}: {llm.n_tokens} tokens, first token after "
                f"{statistics.median(waits[-2 * AROUND - 1 :]) * 1e3:.0f} ms, {llm.kv.summary()}",
                flush=True,
            )
    early = waits[20 - 1 - AROUND : 20 + AROUND]
    late = waits[-2 * AROUND - 1 :]
    ratio = statistics.median(late) / statistics.median(early)
    print(
        f"first token around turn 20: {statistics.median(early) * 1e3:.1f} ms "
        f"({min(early) * 1e3:.1f} to {max(early) * 1e3:.1f})\n"
        f"first token in the last {len(late)} turns: {statistics.median(late) * 1e3:.1f} ms "
        f"({min(late) * 1e3:.1f} to {max(late) * 1e3:.1f}), ratio {ratio:.3f}\n"
        f"tokens in the text: {llm.n_tokens}, evaluated: {conversation.tokens_evaluated}"
    )


if __name__ == "__main__":
    sys.exit(main())
