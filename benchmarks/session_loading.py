"""Loading a saved conversation against reading its text again.

    python benchmarks/session_loading.py --tokens 5000

Both are done in turns, on the same model; reported are medians and ranges.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

from pyh2o import Conversation, Llama
from pyh2o.models import demo_model_path
from pyh2o.system.threads import physical_cores


def seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default: demo model")
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=physical_cores())
    arguments = parser.parse_args()

    llm = Llama(
        str(arguments.model or demo_model_path()),
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
        verbose=False,
    )
    # A long text that every Python has: its own documentation.
    words = llm.tokenize("\n\n".join(topics.values()).encode(), add_bos=False)
    message = llm.detokenize(words[: arguments.tokens]).decode(errors="ignore")
    conversation = Conversation(llm)
    for _ in conversation.say(message, max_tokens=8):
        pass
    tokens = llm.input_ids[: llm.n_tokens].tolist()
    saving, loading, reading = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.h2o"
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            conversation.save(path)
            saving.append(time.perf_counter() - start)

            start = time.perf_counter()
            conversation = Conversation.load(path, llm)
            loading.append(time.perf_counter() - start)

            llm.reset()
            start = time.perf_counter()
            llm.eval(tokens)
            reading.append(time.perf_counter() - start)
            conversation = Conversation.load(path, llm)
        size = path.stat().st_size
    print(
        f"{len(tokens)} tokens, session of {size / 2**20:.1f} MiB\n"
        f"saving: {seconds(saving)}\nloading: {seconds(loading)}\nreading: {seconds(reading)}\n"
        f"loading is {statistics.median(reading) / statistics.median(loading):.0f}x faster"
    )


if __name__ == "__main__":
    sys.exit(main())
