"""Loading a saved conversation against reading its text again.

    python -m research.benchmarks.session_loading --tokens 5000

Both are done in turns, on the same model; reported are medians and ranges.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from pyh2o import Conversation
from research.eval.model import english_text, plain_tokens

from .common import median_and_range, open_model, parser_of


def seconds(times: list[float]) -> str:
    return median_and_range(times, ".3f", "s")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(rows=1638)  # a fifth of the demo model's context
    arguments = parser.parse_args()

    llm = open_model(arguments)
    words = plain_tokens(llm, english_text())
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
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    print(
        f"{len(tokens)} tokens, session with its archive {size / 2**20:.1f} MiB\n"
        f"saving: {seconds(saving)}\nloading: {seconds(loading)}\nreading: {seconds(reading)}\n"
        f"loading is {statistics.median(reading) / statistics.median(loading):.0f}x faster"
    )


if __name__ == "__main__":
    main()
