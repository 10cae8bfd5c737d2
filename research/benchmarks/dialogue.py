"""A long dialogue: the time to the first token must not grow with the turns.

    python -m research.benchmarks.dialogue --turns 200

Every turn asks a question of the same number of tokens. Reported are the time to the first piece of
text around turn 20 and at the end, as medians of eleven turns, and the tokens that were evaluated
against those that were new.
"""

from __future__ import annotations

import statistics
import time

from pyh2o import Conversation
from pyh2o.generation.sampling import Sampling

from .common import median_and_range, open_model, parser_of

QUESTION = (
    "This is question {:03d}: what would you like to tell me about the sea, the town and you?"
)
AROUND = 5


def milliseconds(waits: list[float]) -> str:
    return median_and_range([1e3 * wait for wait in waits], ".1f", "ms")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=100, help="of an answer")
    arguments = parser.parse_args()

    llm = open_model(arguments)
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
        f"first token around turn 20: {milliseconds(early)}\n"
        f"first token in the last {len(late)} turns: {milliseconds(late)}, ratio {ratio:.3f}\n"
        f"tokens in the text: {llm.n_tokens}, evaluated: {conversation.tokens_evaluated}"
    )


if __name__ == "__main__":
    main()
