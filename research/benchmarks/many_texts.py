"""Measure many concurrent stories against llama.cpp's full caches and against one at a time.

    python -m research.benchmarks.many_texts book.txt --history 4096 --texts 1,8,16,32

Each engine has its own process; all are interleaved. All texts of an engine read the same tokens,
and then continue with different seeds. In every round each engine generates the same number of
tokens in all of its texts, with a thread for each. "tok/s" is the sum over all texts, the gap is
the longest time between two tokens of one text, and "while one reads" the same for the others while
one text reads a prompt, for the caches with eviction. "steps" is that gap divided by the duration
of a batch of the others alone, measured just before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pyh2o.bench.process import Child
from pyh2o.bench.rounds import Range, interleaved
from pyh2o.compat.llama import Llama
from pyh2o.engine import Engine
from pyh2o.models import find_model
from pyh2o.system.threads import physical_cores


class Pace:
    """The longest gap between two tokens of one text."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last: dict[int, float] = {}

    def token(self, text: Llama) -> None:
        """Record the time of another token of a text."""
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last.get(id(text), now))
        self._last[id(text)] = now


def write(text: Llama, first: int, pace: Pace, more: Callable[[int], bool]) -> None:
    """Sample tokens after the text, and evaluate them."""
    text.eval([first])
    n = 0
    while more(n):
        pace.token(text)
        text.eval([text.sample(temp=0.8)])
        n += 1


def write_all(texts: Sequence[Llama], first: int, pace: Pace, more: Callable[[int], bool]) -> float:
    """Return the seconds to generate in all texts while `more` is true."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(texts)) as pool:
        for done in [pool.submit(write, text, first, pace, more) for text in texts]:
            done.result()
    return time.perf_counter() - started


class Texts:
    """An engine and its texts in a child process."""

    def __init__(
        self, model: str, n_texts: int, book: Path, history: int, settings: dict[str, Any]
    ) -> None:
        """Let one text read `history` tokens of the book, and give its state to the others."""
        self._engine = Engine(model, texts=n_texts, store_mib=0, **settings)
        self._open = ExitStack()  # keeps the texts open
        slots = [self._open.enter_context(self._engine.slot()) for _ in range(n_texts)]
        self._texts = [Llama.of(slot.text) for slot in slots]
        self._book = self._engine.model.tokenize(book.read_bytes())
        first, *others = self._texts
        first.eval(self._book[:history])
        state = first.kv_state()
        for text in others:
            text.load_kv_state(state, self._book[:history])

    def kv_bytes(self) -> int:
        """Return the memory of the caches of all texts."""
        return sum(text.kv.bytes_total for text in self._texts)

    def write(self, n: int) -> tuple[float, float, float]:
        """Generate in all texts.

        Returns:
            Tokens per second, the longest gap in seconds, texts per batch.
        """
        before, pace = self._engine.batches, Pace()
        seconds = write_all(self._texts, self._book[0], pace, lambda written: written < n)
        after = self._engine.batches
        per_batch = (after.texts - before.texts) / (after.batches - before.batches)
        return n * len(self._texts) / seconds, pace.longest, per_batch

    def write_while_one_reads(self, n_prompt: int, n: int) -> tuple[float, float]:
        """Return the longest gap of the other texts, in seconds and in batches without that one."""
        reader, *writers = self._texts
        first = self._book[0]
        step = write_all(writers, first, Pace(), lambda written: written < n) / n
        pace = Pace()
        reader.reset()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(reader.eval, self._book[:n_prompt])
            write_all(writers, first, pace, lambda _: not reading.done())
            reading.result()
        return pace.longest, pace.longest / step


@dataclass
class Measured:
    """One engine and its measurements of each round."""

    name: str
    n_texts: int
    child: Child
    speeds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    per_batch: float = 0.0
    while_one_reads: list[tuple[float, float]] = field(default_factory=list)

    def write(self, n: int) -> None:
        speed, gap, self.per_batch = self.child.call("write", n)
        self.speeds.append(speed)
        self.gaps.append(gap)
        self._say(f"{speed:.0f} tok/s, longest gap {gap:.3f} s")

    def write_while_one_reads(self, n_prompt: int, n: int) -> None:
        gap, steps = self.child.call("write_while_one_reads", n_prompt, n)
        self.while_one_reads.append((gap, steps))
        self._say(f"longest gap while one reads {gap:.3f} s, {steps:.1f} steps")

    def row(self, best: Sequence[float], single: Sequence[float]) -> str:
        """Return the line of the table."""
        gap, steps = "", ""
        if self.while_one_reads:
            gaps, all_steps = zip(*self.while_one_reads, strict=True)
            gap, steps = f"{1000 * median(gaps):.0f}", f"{median(all_steps):.1f}"
        return (
            f"| {self.name} | {self.n_texts} | {self.child.call('kv_bytes') / 2**20:,.1f} MiB "
            f"| {Range.of(self.speeds):.0f} | {Range.of_ratios(self.speeds, best):.2f} "
            f"| {Range.of_ratios(self.speeds, single):.2f} | {self.per_batch:.1f} "
            f"| {1000 * median(self.gaps):.0f} | {gap} | {steps} |"
        )

    def _say(self, figures: str) -> None:
        print(f"{self.name}, {self.n_texts} texts: {figures}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, help="long UTF-8 file")
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--history", type=int, default=4096, help="tokens of every text at first")
    parser.add_argument("--budget", type=float, default=0.2, help="share of the window")
    parser.add_argument("--texts", default="1,8,16,32", help="concurrent texts; the first is 1")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens that one text reads")
    parser.add_argument("--full", type=int, default=8, help="texts with full caches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readings", type=int, default=3, help="prompts that one text reads")
    parser.add_argument("-n", type=int, default=32, help="tokens of each text in a round")
    parser.add_argument("--threads", type=int, default=physical_cores())
    given = parser.parse_args()

    half = given.budget / 2
    evicting = {"n_ctx": given.window, "hh": half, "recent": half, "recall": 0}
    # space for tokens after a window, as in `pyh2o bench`
    keeping = {"n_ctx": given.window + 256, "evict": False}
    with ExitStack() as stack:

        def opened(name: str, n_texts: int, settings: dict[str, Any]) -> Measured:
            settings |= {"n_threads": given.threads, "n_threads_batch": given.threads}
            opener, model = "research.benchmarks.many_texts:Texts", str(find_model(given.model))
            child = Child(opener, model, n_texts, given.text, given.history, settings)
            return Measured(name, n_texts, stack.enter_context(closing(child)))

        full = [
            opened(name, given.full, {**keeping, "flash_attn": flash})
            for name, flash in (("full", False), ("full, flash attention", True))
        ]
        ours = [opened(f"{given.budget:.0%}", int(n), evicting) for n in given.texts.split(",")]
        for measured in interleaved([*full, *ours], given.rounds):
            measured.write(given.n)
        for measured in interleaved([one for one in ours if one.n_texts > 1], given.readings):
            measured.write_while_one_reads(given.prompt, given.n)
        best = [max(speeds) for speeds in zip(*(each.speeds for each in full), strict=True)]
        print(
            "| caches | texts | KV memory | tok/s in all (range) | x full | x one at a time | "
            "texts in a batch | longest gap, ms | while one reads, ms | steps |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
        )
        for measured in (*full, *ours):
            print(measured.row(best, ours[0].speeds))


if __name__ == "__main__":
    main()
