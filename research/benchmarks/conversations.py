"""Measure waiting times in a conversation: first token, regenerated answer, opened session.

    python -m research.benchmarks.conversations turns --turns 200
    python -m research.benchmarks.conversations another --tokens 1600
    python -m research.benchmarks.conversations loading --tokens 5000

* turns: each asks a question of the same number of tokens. Reported are the time to the first text
  around turn 20 and at the end, as medians of eleven turns, and the evaluated tokens.
* another: the first message has `--tokens` tokens; during the second answer rows are evicted. That
  answer is regenerated repeatedly: the time to its first text with and without snapshots of the
  cache, interleaved, each in its own process.
* loading: a saved conversation against reading its text again, interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from pyh2o import Conversation, Llama
from pyh2o.bench.process import Child
from pyh2o.bench.rounds import Range, interleaved
from pyh2o.limits import DEFAULT_STORE_MIB
from pyh2o.writing.sampling import Sampling

from ..eval.model import english_text, plain_tokens
from .common import open_model, parser_of

QUESTION = (
    "This is question {:03d}: what would you like to tell me about the sea, the town and you?"
)
AROUND = 5


def seconds(work: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def to_the_end(pieces: Iterable[str]) -> float:
    """Return the seconds until the first text of an answer, which is generated to its end."""
    start, first = time.perf_counter(), 0.0
    for _ in pieces:
        first = first or time.perf_counter() - start
    return first or time.perf_counter() - start


def long_message(llm: Llama, n_tokens: int) -> str:
    """Return a text of `n` tokens."""
    text: bytes = llm.detokenize(plain_tokens(llm, english_text())[:n_tokens])
    return text.decode(errors="ignore")


def turns(given: argparse.Namespace) -> None:
    """A long conversation: the time to the first token must not grow with the turns."""
    llm = open_model(given)
    talk = Conversation(llm, system="You are a friendly sailor.", sampling=Sampling(seed=7))
    waits = []
    for turn in range(1, given.turns + 1):
        said = talk.say(QUESTION.format(turn), max_tokens=given.max_tokens)
        waits.append(1e3 * to_the_end(said))
        if turn % 20 == 0:
            wait = statistics.median(waits[-2 * AROUND - 1 :])
            print(
                f"turn {turn}: {llm.n_tokens} tokens, {wait:.0f} ms, {llm.kv.summary()}", flush=True
            )
    early, late = waits[20 - 1 - AROUND : 20 + AROUND], waits[-2 * AROUND - 1 :]
    print(
        f"first token around turn 20: {Range.of(early):.1f} ms\n"
        f"in the last {len(late)} turns: {Range.of(late):.1f} ms, "
        f"ratio {statistics.median(late) / statistics.median(early):.3f}\n"
        f"tokens in the text: {llm.n_tokens}, evaluated: {llm.text.model.batcher.counts.tokens}"
    )


class Regenerated:
    """A conversation in a child process whose last answer is regenerated."""

    def __init__(self, given: argparse.Namespace, mib: int) -> None:
        """Read the first message, and answer the second."""
        llm = open_model(given, store_mib=mib)
        self._n = given.answer
        self._folder = tempfile.TemporaryDirectory()
        self._talk = Conversation(llm, sampling=Sampling(seed=7))
        long = "Tell me a long story about it."
        for text, n in ((long_message(llm, given.tokens), 8), (long, given.answer)):
            self._timed(self._talk.say(text, max_tokens=n))

    def regenerate(self) -> float:
        """Return the seconds to the first text of a regenerated answer."""
        return self._timed(self._talk.regenerate(max_tokens=self._n))

    def _timed(self, answer: Iterable[str]) -> float:
        wait = to_the_end(answer)
        self._talk.save(Path(self._folder.name) / "session")  # as a chat does
        return wait

    def snapshots(self) -> tuple[int, float, int, int]:
        """Return tokens before the answer, seconds per snapshot, and their number and bytes."""
        talk, stored = self._talk, self._talk.llm.model.snapshots.counts
        taken = seconds(talk.llm.kv_state)
        return talk.turns[-1].answer_start, taken, stored.texts, stored.bytes


def regenerate(given: argparse.Namespace) -> None:
    """Measure a regenerated answer by the MiB that snapshots of the cache may take."""
    opener = "research.benchmarks.conversations:Regenerated"
    with ExitStack() as stack:
        talks = {
            mib: stack.enter_context(closing(Child(opener, given, mib)))
            for mib in (DEFAULT_STORE_MIB, 0)
        }
        times: dict[int, list[float]] = {mib: [] for mib in talks}
        for mib in interleaved(list(talks), given.rounds):
            times[mib].append(talks[mib].call("another"))
        start, taken, n, n_bytes = talks[DEFAULT_STORE_MIB].call("snapshots")
    print(
        f"{start} tokens before the answer\n"
        f"from snapshots: {Range.of(times[DEFAULT_STORE_MIB]):.2f} s\n"
        f"without: {Range.of(times[0]):.2f} s\n"
        f"a snapshot takes {1000 * taken:.0f} ms; {n} of them {n_bytes / 2**20:.1f} MiB"
    )


def loading(given: argparse.Namespace) -> None:
    """Measure loading a session against reading its text."""
    llm = open_model(given)
    talk = Conversation(llm)
    to_the_end(talk.say(long_message(llm, given.tokens), max_tokens=8))
    tokens = llm.input_ids[: llm.n_tokens].tolist()
    times: dict[str, list[float]] = {"saving": [], "loading": [], "reading": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.h2o"
        for _ in range(given.rounds):
            times["saving"].append(seconds(partial(talk.save, path)))
            times["loading"].append(seconds(partial(Conversation.load, path, llm)))
            llm.reset()
            times["reading"].append(seconds(partial(llm.eval, tokens)))
            talk = Conversation.load(path, llm)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    print(f"{len(tokens)} tokens, session with its archive {size / 2**20:.1f} MiB")
    for what, found in times.items():
        print(f"{what}: {Range.of(found):.3f} s")
    ratio = statistics.median(times["reading"]) / statistics.median(times["loading"])
    print(f"loading is {ratio:.0f}x faster")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("turns", "another", "loading"))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=100, help="per answer")
    parser.add_argument("--tokens", type=int, default=1600, help="length of the first message")
    parser.add_argument("--answer", type=int, default=330, help="tokens to regenerate")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    {"turns": turns, "another": regenerate, "loading": loading}[given.what](given)


if __name__ == "__main__":
    main()
