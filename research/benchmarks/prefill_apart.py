"""Reading prompts in a process of its own, whose state is handed over, against one engine for both.

    python -m research.benchmarks.prefill_apart book.txt --prompts 4

A stream of prompts comes while seven texts are written. "together" is one engine with all threads;
"apart" is one process that reads the prompts and one that writes, with half of the threads each,
and the state of every prompt goes from the one to the other. The same work is done in both: it is
timed until the last prompt has its first token, and until all texts are written.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pyh2o import Llama
from pyh2o.engine import Engine
from pyh2o.models import find_model
from pyh2o.system.threads import physical_cores

from .many_texts import Pace, write

N_WRITERS = 7


def settings_of(n_threads: int) -> dict[str, Any]:
    """Of a model with so many threads."""
    return {"n_ctx": 8192, "n_threads": n_threads, "n_threads_batch": n_threads}


def read_apart(arguments: argparse.Namespace, n_threads: int, to_writer: Connection) -> None:
    """The process that reads: sends the state behind each prompt."""
    model = str(find_model(arguments.model))
    with Llama(model, **settings_of(n_threads)) as llm:
        tokens = llm.tokenize(arguments.text.read_bytes())
        to_writer.send("ready")
        to_writer.recv()
        for prompt in prompts_of(tokens, arguments):
            llm.reset()
            llm.eval(prompt)
            to_writer.send_bytes(llm.kv_state())


def prompts_of(tokens: list[int], arguments: argparse.Namespace) -> list[list[int]]:
    """Different ones, one after the other in the text."""
    n = arguments.length
    return [tokens[i * n : (i + 1) * n] for i in range(arguments.prompts)]


def run(arguments: argparse.Namespace, *, apart: bool) -> tuple[float, float, float]:
    """Seconds until the last prompt's first token and until the end, and the longest gap."""
    n_threads = max(1, arguments.threads // 2) if apart else arguments.threads
    with ExitStack() as stack:
        mine, other = multiprocessing.Pipe()
        process = multiprocessing.Process(target=read_apart, args=(arguments, n_threads, other))
        if apart:
            process.start()
            mine.recv()
        engine = Engine(
            str(find_model(arguments.model)),
            texts=N_WRITERS + 1,
            store_mib=0,
            **settings_of(n_threads),
        )
        stack.enter_context(engine)
        reader, *writers = [stack.enter_context(engine.text()) for _ in range(N_WRITERS + 1)]
        tokens = engine.model.tokenize(arguments.text.read_bytes())
        for text in writers:
            text.reset()
            text.eval(tokens[:64])
        pace = Pace()
        threads = [
            threading.Thread(target=write, args=(text, tokens[0], arguments.n, pace))
            for text in writers
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        if apart:
            mine.send("go")
        for prompt in prompts_of(tokens, arguments):
            if apart:
                reader.load_kv_state(mine.recv_bytes(), prompt)
                reader.eval([tokens[0]])
            else:
                reader.reset()
                reader.eval([*prompt, tokens[0]])
            reader.sample()
        read = time.perf_counter() - started
        for thread in threads:
            thread.join()
        written = time.perf_counter() - started
        if apart:
            process.join()
        return read, written, pace.longest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path, help="UTF-8 file that is long enough")
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("-n", type=int, default=150, help="tokens that each text writes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=physical_cores())
    arguments = parser.parse_args()

    figures: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for _ in range(arguments.rounds):
        for apart in figures:
            figures[apart].append(run(arguments, apart=apart))
    print("| | prompts read, s | all written, s | longest gap, ms |\n|---|---:|---:|---:|")
    for apart, rounds in figures.items():
        read, written, gap = (statistics.median(column) for column in zip(*rounds, strict=True))
        name = "apart" if apart else "together"
        print(f"| {name} | {read:.1f} | {written:.1f} | {1000 * gap:.0f} |")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
