"""Facts in a long history, each said once: whether a question brings them back, and how fast.

    python benchmarks/distant_facts.py --text book.txt --tokens 100000 --rows 820 --recall 410

The text is repeated as often as it takes, with a number for a person of its own at even distances.
After all of it has been read, each number is asked for; the question and its answer are then taken
back. Reported are the answers that are right, the time from the question to the first token of the
answer, the speed of generation with what was recalled in place and with as many rows that are not
recalled, and the memory of the archive.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from common import median_and_range, open_model, parser_of

from pyh2o import Llama
from pyh2o.generation.sampling import Sampling
from pyh2o.generation.writer import Writer

NAMES = ["Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas"]
FACT = "\nRemember this: the secret number of {name} is {number}.\n"
QUESTION = (
    "\nQuestion: what is the secret number of {name}?\nAnswer: the secret number of {name} is"
)
ANSWER_TOKENS = 8
TIMED_TOKENS = 128


def with_facts(llm: Llama, text: str, n_tokens: int, numbers: dict[str, str]) -> list[int]:
    """The tokens of the text, repeated up to so many, with the facts at even distances."""
    prose = llm.tokenize(text.encode(), add_bos=True)
    prose *= -(-n_tokens // len(prose))
    facts = [
        llm.tokenize(FACT.format(name=name, number=number).encode(), add_bos=False)
        for name, number in numbers.items()
    ]
    size = (n_tokens - sum(map(len, facts))) // len(facts)
    tokens: list[int] = []
    for i, fact in enumerate(facts):
        piece = prose[i * size : (i + 1) * size]
        tokens += [*piece[: size // 2], *fact, *piece[size // 2 :]]
    return tokens


def ask(llm: Llama, name: str) -> tuple[str, float]:
    """The answer, and the seconds until its first token."""
    question = llm.tokenize(QUESTION.format(name=name).encode(), add_bos=False)
    start, began = llm.n_tokens, time.perf_counter()
    answer: list[int] = []
    first = 0.0
    for token in Writer(llm, Sampling(temperature=0.0, repeat_penalty=1.0)).write(question):
        first = first or time.perf_counter() - began
        answer.append(token)
        if len(answer) == ANSWER_TOKENS:
            break
    llm.remove_tail(start)
    return llm.detokenize(answer).decode(errors="replace"), first


def speed(llm: Llama, tokens: Sequence[int]) -> float:
    """Tokens per second, read one by one as they are when they are generated; taken back then."""
    start, began = llm.n_tokens, time.perf_counter()
    for token in tokens:
        llm.eval([token])
    seconds = time.perf_counter() - began
    llm.remove_tail(start)
    return len(tokens) / seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--recall", type=int, default=256, help="rows beside the others")
    parser.add_argument("--recall-type", default="q8_0")
    parser.add_argument("--facts", type=int, default=10, choices=range(1, 11))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    text = " ".join(arguments.text.read_text(encoding="utf-8").split())

    draw = random.Random(arguments.seed)
    numbers = {name: str(draw.randint(1_000_000, 9_999_999)) for name in NAMES[: arguments.facts]}
    llm = open_model(arguments, recall=arguments.recall, recall_type=arguments.recall_type)
    tokens = with_facts(llm, text, arguments.tokens, numbers)
    began = time.perf_counter()
    llm.eval(tokens)
    reading = time.perf_counter() - began
    print(f"read {len(tokens):,} tokens, {len(tokens) / reading:.0f} tokens/s", flush=True)

    waits: list[float] = []
    right = 0
    for name, number in numbers.items():
        answer, wait = ask(llm, name)
        right += number in answer
        waits.append(wait)
        spans = [f"{span.start}-{span.end}" for span in llm.recalled() if span.weight > 0.01]
        print(
            f"{name}: {number} {answer!r} after {wait:.2f} s, from {', '.join(spans)}", flush=True
        )

    some = tokens[:TIMED_TOKENS]
    recalled = [speed(llm, some) for _ in range(5)]
    kv = llm.kv
    arguments.rows += arguments.recall
    other = open_model(arguments)
    other.eval(tokens[: 4 * arguments.rows])
    plain = [speed(other, some) for _ in range(5)]
    found = f"right: {right} of {len(numbers)}"
    recalls = f"a recall: {kv.recall_seconds / max(1, kv.recalls):.3f} s, {kv.recalls} of them"
    ratio = statistics.median(recalled) / statistics.median(plain)
    print(
        f"{found}\n"
        f"first token: {median_and_range(waits, '.2f', 's')}\n"
        f"{recalls}; copying to the archive: {kv.archive_seconds:.1f} s in all\n"
        f"generation with recalled rows: {median_and_range(recalled, '.1f', 'tokens/s')}\n"
        f"with as many of the budget: {median_and_range(plain, '.1f', 'tokens/s')}\n"
        f"ratio {ratio:.3f}\n"
        f"archive: {kv.archived:,} tokens, {kv.bytes_archive / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
