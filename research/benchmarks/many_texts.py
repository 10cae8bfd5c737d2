"""Many stories at once against llama.cpp's full caches and against one at a time, by turns.

    python -m research.benchmarks.many_texts book.txt --history 4096 --texts 1,8,16,32

Each engine has read the same tokens of a text; its places get copies of that state, and then each
goes on with another seed. In every round each engine writes so many tokens in all of its texts, in
a thread for each. "tok/s" is of all texts together, the gap is the longest time between two tokens
of one text, and "while one reads" the same for the others as long as one text reads a prompt, with
the caches that evict; "steps" are so many batches without it, as they were just before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyh2o.compat.llama import Llama
from pyh2o.engine import Engine
from pyh2o.models import find_model
from pyh2o.system.threads import physical_cores


@dataclass
class Measured:
    """One engine and what it did in each round."""

    name: str
    engine: Engine
    texts: list[Llama]
    speeds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    gaps_beside_reading: list[float] = field(default_factory=list)
    steps_beside_reading: list[float] = field(default_factory=list)
    per_batch: float = 0.0

    @property
    def kv_mib(self) -> float:
        """Memory of the caches of all texts."""
        return sum(text.kv.bytes_total for text in self.texts) / 2**20


class Pace:
    """The longest gap between two tokens of one of several texts."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last: dict[int, float] = {}

    def token(self, text: Llama) -> None:
        """A text has another token."""
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last.get(id(text), now))
        self._last[id(text)] = now


def write(text: Llama, first: int, pace: Pace, go_on: Callable[[int], bool]) -> None:
    """Draw tokens behind the text, and evaluate them."""
    text.eval([first])
    n = 0
    while go_on(n):
        pace.token(text)
        text.eval([text.sample(temp=0.8)])
        n += 1


def write_all(
    texts: Sequence[Llama], first: int, pace: Pace, go_on: Callable[[int], bool]
) -> float:
    """Seconds that it takes to write in each text for as long as it is to go on."""
    threads = [threading.Thread(target=write, args=(text, first, pace, go_on)) for text in texts]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def measure(measured: Measured, tokens: list[int], n: int) -> None:
    """One turn of an engine."""
    before, pace = measured.engine.batches, Pace()
    seconds = write_all(measured.texts, tokens[0], pace, lambda written: written < n)
    after = measured.engine.batches
    measured.speeds.append(n * len(measured.texts) / seconds)
    measured.gaps.append(pace.longest)
    say(measured, f"{measured.speeds[-1]:.0f} tok/s, longest gap {pace.longest:.3f} s")
    measured.per_batch = (after.texts - before.texts) / (after.batches - before.batches)


def measure_beside_reading(measured: Measured, prompt: list[int], n: int) -> None:
    """The gap of all texts but one, which reads a prompt meanwhile."""
    reader, *writers = measured.texts
    if not writers:
        return
    step = write_all(writers, prompt[0], Pace(), lambda written: written < n) / n
    pace = Pace()
    reader.reset()
    reading = threading.Thread(target=reader.eval, args=(prompt,))
    reading.start()
    write_all(writers, prompt[0], pace, lambda _: reading.is_alive())
    reading.join()
    measured.gaps_beside_reading.append(pace.longest)
    steps = pace.longest / step
    measured.steps_beside_reading.append(steps)
    say(measured, f"longest gap while one reads {pace.longest:.3f} s, {steps:.1f} steps")


def say(measured: Measured, what: str) -> None:
    """Show how it goes."""
    print(f"{measured.name}, {len(measured.texts)} texts: {what}", file=sys.stderr, flush=True)


def opened(
    stack: ExitStack, name: str, n_texts: int, arguments: argparse.Namespace, **settings: Any
) -> Measured:
    """An engine with a place for each text."""
    engine = Engine(
        str(find_model(arguments.model)),
        texts=n_texts,
        store_mib=0,
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
        **settings,
    )
    stack.enter_context(engine)
    texts = [stack.enter_context(engine.text()) for _ in range(n_texts)]
    return Measured(name, engine, texts)


def prepare(group: Sequence[Measured], tokens: list[int]) -> None:
    """Let all texts of engines with equal settings have read the tokens."""
    first = group[0].texts[0]
    first.reset()
    first.eval(tokens)
    state = first.kv_state()
    for measured in group:
        for text in measured.texts:
            if text is not first:
                text.load_kv_state(state, tokens)


def table(all_measured: Sequence[Measured], full: Sequence[Measured], single: Measured) -> str:
    """Markdown, with the ratios of each round."""
    best = [max(speeds) for speeds in zip(*(each.speeds for each in full), strict=True)]
    lines = [
        "| caches | texts | KV memory | tok/s in all (range) | x full | x one at a time | texts in "
        "a batch | longest gap, ms | while one reads, ms | steps |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in all_measured:
        low, high = min(each.speeds), max(each.speeds)
        beside, steps = each.gaps_beside_reading, each.steps_beside_reading
        lines.append(
            f"| {each.name} | {len(each.texts)} | {each.kv_mib:,.1f} MiB "
            f"| {statistics.median(each.speeds):.0f} ({low:.0f}-{high:.0f}) "
            f"| {ratio(each.speeds, best)} | {ratio(each.speeds, single.speeds)} "
            f"| {each.per_batch:.1f} | {1000 * statistics.median(each.gaps):.0f} "
            f"| {f'{1000 * statistics.median(beside):.0f}' if beside else ''} "
            f"| {f'{statistics.median(steps):.1f}' if steps else ''} |"
        )
    return "\n".join(lines)


def ratio(speeds: Sequence[float], others: Sequence[float]) -> str:
    """Median and range of the ratios within a round."""
    ratios = [mine / other for mine, other in zip(speeds, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, help="UTF-8 file that is long enough")
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--history", type=int, default=4096, help="tokens that every text has")
    parser.add_argument("--budget", type=float, default=0.2, help="share of the window")
    parser.add_argument("--texts", default="1,8,16,32", help="at once, of ours; the first is 1")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens that one text reads")
    parser.add_argument("--full", type=int, default=8, help="texts with full caches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--readings", type=int, default=3, help="prompts that one text reads")
    parser.add_argument("-n", type=int, default=32, help="tokens of each text in a round")
    parser.add_argument("--threads", type=int, default=physical_cores())
    arguments = parser.parse_args()

    counts = [int(count) for count in arguments.texts.split(",")]
    half = arguments.budget / 2
    # room for what is written behind a window, as `pyh2o bench` has it
    room = arguments.window + 256
    with ExitStack() as stack:
        ours = [
            opened(
                stack, f"{arguments.budget:.0%}", n, arguments,
                n_ctx=arguments.window, hh=half, recent=half, recall=0,
            )
            for n in counts
        ]  # fmt: skip
        full = [
            opened(stack, name, arguments.full, arguments, n_ctx=room, evict=False, flash_attn=fa)
            for name, fa in (("full", False), ("full, flash attention", True))
        ]
        book = full[0].engine.model.tokenize(arguments.text.read_bytes())
        tokens, prompt = book[: arguments.history], book[: arguments.prompt]
        for group in (ours, full[:1], full[1:]):
            prepare(group, tokens)
        for _ in range(arguments.rounds):
            for measured in [*full, *ours]:
                measure(measured, tokens, arguments.n)
        for measured in ours:
            for _ in range(arguments.readings):
                measure_beside_reading(measured, prompt, arguments.n)
        print(table([*full, *ours], full, ours[0]))


if __name__ == "__main__":
    main()
