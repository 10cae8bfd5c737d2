"""How long another answer takes to begin, from copies of the cache and without.

    python -m research.benchmarks.another_answer --tokens 1600

A text of so many tokens is the first message of a conversation, and an answer during which rows are
evicted follows to the second. That is drawn again and again: reported is the time from `regenerate`
to the first piece of text. After each answer the conversation is saved, as a chat does. Both are
done in turns, each in a model of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pyh2o import Conversation
from pyh2o.generation.sampling import Sampling
from pyh2o.text.cache_copies import DEFAULT_MIB
from research.eval.model import english_text, plain_tokens

from .common import median_and_range, open_model, parser_of


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1600)
    parser.add_argument("--answer", type=int, default=330, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.set_defaults(rows=512)
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        talks = {mib: begun(arguments, mib, Path(folder)) for mib in (DEFAULT_MIB, 0)}
        times: dict[int, list[float]] = {mib: [] for mib in talks}
        for _ in range(arguments.rounds):
            for mib, talk in talks.items():
                times[mib].append(seconds_to_another(talk, arguments.answer))
                talk.save(Path(folder) / str(mib))
        talk = talks[DEFAULT_MIB]
        start = time.perf_counter()
        talk.llm.kv_state()
        taken = time.perf_counter() - start
    print(
        f"{talk.turns[-1].answer_start} tokens before the answer\n"
        f"from copies: {median_and_range(times[DEFAULT_MIB], '.2f', 's')}\n"
        f"without: {median_and_range(times[0], '.2f', 's')}\n"
        f"a copy takes {taken * 1000:.0f} ms; {len(talk.copies)} of them "
        f"{talk.copies.n_bytes / 2**20:.1f} MiB"
    )


def begun(arguments: argparse.Namespace, mib: int, folder: Path) -> Conversation:
    """A conversation with its second answer."""
    llm = open_model(arguments)
    words = plain_tokens(llm, english_text())
    message = llm.detokenize(words[: arguments.tokens]).decode(errors="ignore")
    talk = Conversation(llm, sampling=Sampling(seed=7), copies_mib=mib)
    for text, n_answer in ((message, 8), ("Tell me a long story about it.", arguments.answer)):
        for _ in talk.say(text, max_tokens=n_answer):
            pass
        talk.save(folder / str(mib))
    return talk


def seconds_to_another(talk: Conversation, n_answer: int) -> float:
    """Until its first piece of text; it is drawn to its end."""
    start = time.perf_counter()
    pieces = talk.regenerate(max_tokens=n_answer)
    next(pieces)
    seconds = time.perf_counter() - start
    for _ in pieces:
        pass
    return seconds


if __name__ == "__main__":
    main()
