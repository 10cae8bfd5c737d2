"""Facts in a long history, each said once: whether a question brings them back, and how fast.

    python -m research.benchmarks.distant_facts --text book.txt --tokens 100000

The text is read as the first message of a conversation, with ten facts in it at even distances; it
is repeated as often as it takes. Then each fact is asked for; the question and its answer are taken
back. Reported are the answers that are right, the loss of the right one, how often the passage was
among those that were looked at, the time from the question to the first token of the answer, the
speed of generation, against a cache of as many rows that finds none, and how long the session takes
to be saved and opened, with its archive in a file.

With --alike the facts are ten numbers that belong to ten names, in sentences of one form. With
--full the cache is llama.cpp's own, as far as the model was trained: what it gets right is what can
be expected.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyh2o import Conversation, Llama
from pyh2o.generation.sampling import Sampling
from pyh2o.generation.writer import Writer
from research.eval.reading import answer_surprises, found_share

from .common import median_and_range, open_model, parser_of

ANSWER_TOKENS = 12
TIMED_TOKENS = 128
SAVES = 5


@dataclass(frozen=True)
class Fact:
    """A sentence of the text, a question, and how its answer begins and goes on."""

    sentence: str
    question: str
    begun: str
    answer: str


def _fact(sentence: str, question: str, answer: str) -> Fact:
    return Fact(f"{sentence} {answer}.", question, sentence, answer)


FACTS = [
    _fact("The treasure is buried under the old", "where is the treasure buried", "windmill"),
    _fact("The ship in the harbour is called the", "how is the ship called", "Silver Heron"),
    _fact("My sister's telephone number is", "what is my sister's telephone number", "5830147"),
    _fact("The recipe for the cake needs this much sugar:", "how much sugar", "475 grams"),
    _fact("Our cat was born in the village of", "in what village was our cat born", "Brackenford"),
    _fact(
        "The password of the old computer is",
        "what is the password of the old computer",
        "tulip-9921",
    ),
    _fact("The dentist expects me on", "when does the dentist expect me", "Thursday the 14th"),
    _fact("The violin was made by", "who made the violin", "Teodoro Valsecchi"),
    _fact("The train to the mountains leaves from platform", "from which platform", "17"),
    _fact("The name of the dragon is", "what is the name of the dragon", "Orsovane"),
]
NAMES = ["Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas"]


def alike(seed: int) -> list[Fact]:
    """A number for each name."""
    draw = random.Random(seed)
    numbers = [str(draw.randint(1_000_000, 9_999_999)) for _ in NAMES]
    return [
        _fact(f"The secret number of {name} is", f"what is the secret number of {name}", number)
        for name, number in zip(NAMES, numbers, strict=True)
    ]


def with_facts(llm: Llama, text: str, n_tokens: int, facts: Sequence[Fact]) -> str:
    """The text, repeated up to so many tokens, with the facts at even distances."""
    words = text.split()
    n_words = round(n_tokens * len(words) / len(llm.tokenize(text.encode())))
    words = (words * -(-n_words // len(words)))[:n_words]
    size = n_words // len(facts)
    pieces: list[str] = []
    for i, fact in enumerate(facts):
        piece = words[i * size : (i + 1) * size]
        pieces += [
            " ".join(piece[: size // 2]),
            f"Remember this: {fact.sentence}",
            " ".join(piece[size // 2 :]),
        ]
    return "\n\n".join(pieces)


@dataclass(frozen=True)
class Answer:
    text: str
    seconds: float  # until its first token
    nll: float  # of the right one, nats per token
    passages: list[tuple[float, int, int, str]]  # looked at, the strongest first
    found: float | None  # share of attention that rows got which were found


def ask(llm: Llama, fact: Fact) -> Answer:
    question = f"\n\nQuestion: {fact.question}?\n\nAnswer: {fact.begun}"
    tokens = llm.tokenize(question.encode(), add_bos=False)
    start, began = llm.n_tokens, time.perf_counter()
    answer: list[int] = []
    first = 0.0
    for token in Writer(llm, Sampling(temperature=0.0, repeat_penalty=1.0)).write(tokens):
        first = first or time.perf_counter() - began
        answer.append(token)
        if len(answer) == ANSWER_TOKENS:
            break
    spans = llm.recalled() if llm.recalls else []
    passages = sorted(((one.weight, one.start, one.end, one.text) for one in spans), reverse=True)
    found = found_share(llm)
    llm.remove_tail(start + len(tokens) - 1)
    right = llm.tokenize(f" {fact.answer}".encode(), add_bos=False)
    nll = float(answer_surprises(llm, tokens[-1], right).mean())
    llm.remove_tail(start)
    text = llm.detokenize(answer).decode(errors="replace")
    return Answer(text, first, nll, passages, found)


def ask_all(llm: Llama, facts: Sequence[Fact]) -> None:
    answers = []
    for fact in facts:
        answer = ask(llm, fact)
        answers.append(answer)
        best = ", ".join(
            f"{start}-{end} ({weight:.3f})" for weight, start, end, _ in answer.passages[:3]
        )
        print(
            f"{fact.answer!r}: {answer.text!r}, loss {answer.nll:.2f}, after {answer.seconds:.2f} "
            f"s, {answer.found or 0:.1%} of attention found, from {best}",
            flush=True,
        )
    right = sum(fact.answer in answer.text for fact, answer in zip(facts, answers, strict=True))
    n_found = sum(
        any(fact.answer in passage for *_, passage in answer.passages)
        for fact, answer in zip(facts, answers, strict=True)
    )
    print(
        f"right: {right} of {len(facts)}, the passage looked at: {n_found}, "
        f"loss {statistics.mean(answer.nll for answer in answers):.3f}\n"
        f"first token: {median_and_range([answer.seconds for answer in answers], '.2f', 's')}"
    )


def speed(llm: Llama, tokens: Sequence[int]) -> float:
    """Tokens per second, read one by one as they are when they are generated; taken back then."""
    start, began = llm.n_tokens, time.perf_counter()
    for token in tokens:
        llm.eval([token])
    seconds = time.perf_counter() - began
    llm.remove_tail(start)
    return len(tokens) / seconds


def compare_speeds(llm: Llama, arguments: argparse.Namespace) -> None:
    """By turns with a cache of as many rows that finds none."""
    tokens = llm.input_ids[: 4 * arguments.rows].tolist()
    some = tokens[-TIMED_TOKENS:]
    with open_model(arguments, recall=0) as other:
        other.eval(tokens)
        pairs = [(speed(llm, some), speed(other, some)) for _ in range(7)]
    finding, plain = zip(*pairs, strict=True)
    print(
        f"generation with {llm.kv.limits.recall} of {arguments.rows} rows found: "
        f"{median_and_range(finding, '.1f', 'tokens/s')}\n"
        f"with all of them in the cache: {median_and_range(plain, '.1f', 'tokens/s')}\n"
        f"ratio {median_and_range([mine / theirs for mine, theirs in pairs], '.3f', '')}"
    )


def time_session(conversation: Conversation, llm: Llama, path: Path) -> None:
    """Turns that are saved, and the session opened again."""
    saving: list[float] = []
    for _ in range(SAVES):
        for _ in conversation.say("Tell me a little more.", max_tokens=16):
            pass
        began = time.perf_counter()
        conversation.save(path)
        saving.append(time.perf_counter() - began)
    loading: list[float] = []
    for _ in range(SAVES):
        began = time.perf_counter()
        Conversation.load(path, llm)
        loading.append(time.perf_counter() - began)
    print(
        f"saving a turn: {median_and_range(saving, '.3f', 's')}, the first {saving[0]:.3f} s\n"
        f"opening the session: {median_and_range(loading, '.3f', 's')}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.set_defaults(rows=1638)
    parser.add_argument("--recall-type", default="q8_0")
    parser.add_argument("--alike", action="store_true", help="ten facts of one form")
    parser.add_argument("--full", action="store_true", help="llama.cpp's own cache")
    parser.add_argument("--seed", type=int, default=1, help="of the numbers of --alike")
    arguments = parser.parse_args()
    text = " ".join(arguments.text.read_text(encoding="utf-8").split())

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "recall_type": arguments.recall_type,
            "recall_archive": str(Path(folder) / "facts.archive"),
        }
        full = {"evict": False, "recall": 0}
        llm = open_model(arguments, **(full if arguments.full else settings))
        facts = alike(arguments.seed) if arguments.alike else FACTS
        conversation = Conversation(llm)
        began = time.perf_counter()
        for _ in conversation.say(with_facts(llm, text, arguments.tokens, facts), max_tokens=1):
            pass
        seconds = time.perf_counter() - began
        print(f"read {llm.n_tokens:,} tokens, {llm.n_tokens / seconds:.0f} tokens/s", flush=True)

        ask_all(llm, facts)
        if arguments.full:
            return
        kv = llm.kv
        print(
            f"copying to the archive: {kv.archive_seconds:.1f} s in all\n"
            f"archive: {kv.archived:,} tokens, {kv.bytes_archive / 2**20:.0f} MiB",
            flush=True,
        )
        compare_speeds(llm, arguments)
        time_session(conversation, llm, Path(folder) / "facts.h2o")


if __name__ == "__main__":
    main()
