"""Measure ten turns of a chat with reasoning: tokens read again, cached rows and waiting times.

    python -m research.benchmarks.reasoning --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf

The client sends the history without reasoning, as clients do. A grammar makes the model write
between <think> and </think> before each answer. Three ways, interleaved, each with its own model:

* dropped: reasoning is dropped from the cache when its answer has ended;
* kept: reasoning stays, and the history without it is read again (`keep_reasoning`);
* full: a full cache, which is read again from the first reasoning that the history lacks.

The last lines show how far the logits of a next turn are from those of the history read again, in a
cache with space for all of it, if reasoning was dropped and if it was kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pyh2o import Llama
from pyh2o.bench.rounds import interleaved
from pyh2o.core.text import Text

from .common import open_model, parser_of

# isort: split
from llama_cpp import LlamaGrammar  # after pyh2o, so that it uses pyh2o's library

GRAMMAR = 'root ::= "<think>\\n" [^<>]{{{0},{1}}} "\\n</think>\\n\\n" [A-Z] [^<>\\n]{{1,{2}}} "."'
SYSTEM = "Think about the question first, between <think> and </think>. Then answer briefly."
QUESTIONS = (
    "What would you pack for three days at the sea in October?",
    "How do lighthouses differ from each other, so that sailors know them?",
    "Why does the tide come twice a day?",
    "What could a clockmaker in a harbour town be asked to repair?",
    "How would you explain a knot to a child?",
    "Which of these answers would you give differently to a sailor?",
    "What does salt do to brass?",
    "How long does a candle of two pounds burn?",
    "What do gulls eat in winter?",
    "Which of my questions was the hardest, and why?",
)


NEXT = """<|im_end|>
<|im_start|>user
And if it rained all the time, what would you do then?<|im_end|>
<|im_start|>assistant
Then I would stay at the inn, and look at the harbour through the window until it was over."""


def message(role: str, content: str) -> Any:
    return {"role": role, "content": content}


class Chat:
    """A client and its model.

    Attributes:
        messages: the history, without reasoning.
    """

    def __init__(self, llm: Llama, grammar: str) -> None:
        self.llm = llm
        self._grammar = grammar
        self.messages = [message("system", SYSTEM)]

    def ask(self, question: str, seed: int) -> tuple[float, float, int]:
        """Return seconds to an answer's first text and to its end, and the tokens read for it."""
        self.messages.append(message("user", question))
        counts, n_sampled = self.llm.text.model.batcher.counts.tokens, self.llm.text.n_sampled
        start, first, text = time.perf_counter(), 0.0, ""
        for chunk in self.llm.create_chat_completion(
            self.messages,
            stream=True,
            seed=seed,
            max_tokens=2000,
            grammar=LlamaGrammar.from_string(self._grammar, verbose=False),
        ):
            first = first or time.perf_counter() - start
            text += chunk["choices"][0]["delta"].get("content") or ""
        last = time.perf_counter() - start
        self.messages.append(message("assistant", text.rpartition("</think>")[2].strip()))
        n_sampled = self.llm.text.n_sampled - n_sampled
        return first, last, self.llm.text.model.batcher.counts.tokens - counts - n_sampled + 1


def logits_of(llm: Llama, tokens: list[int]) -> npt.NDArray[np.floating[Any]]:
    """Return log-probabilities after each token, [len(tokens), n_vocab]."""
    rows = []
    for token in tokens:
        llm.eval([token])
        logits = llm.text.logits[-1].astype(np.float64)
        rows.append(logits - np.logaddexp.reduce(logits))
    return np.array(rows)


def compare(text: Text, given: argparse.Namespace) -> None:
    """Compare the logits of a next turn with those of the history read again without reasoning."""
    roomy = argparse.Namespace(**vars(given) | {"rows": given.ctx, "recent": None, "recall": 0})
    tokens, spans = text.tokens.tolist(), text.dropped_spans
    read = {
        "read again": text.tokens[text.kept_positions].tolist(),
        "dropped": tokens,
        "kept": tokens,
    }
    found = {}
    for name, whole in read.items():
        with open_model(roomy, n_ctx=given.ctx) as llm:
            llm.eval(whole)
            if name == "dropped":
                llm.text.drop_spans(spans)
            probe = llm.tokenize(NEXT.encode(), add_bos=False, special=True)
            found[name] = logits_of(llm, probe)
    expected = found.pop("read again")
    for name, logits in found.items():
        divergence = (np.exp(expected) * (expected - logits)).sum(axis=-1)
        same = np.mean(expected.argmax(axis=-1) == logits.argmax(axis=-1))
        print(
            f"next turn, reasoning {name}: {divergence.mean():.4f} nats per token (KL) from the "
            f"history read again, same most probable token {100 * same:.0f} % of the time"
        )


def run() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument(
        "--reasoning", type=int, default=600, help="minimum characters of the reasoning"
    )
    parser.add_argument("--answer", type=int, default=300, help="maximum characters of the answer")
    given = parser.parse_args()
    grammar = GRAMMAR.format(given.reasoning, given.reasoning * 3 // 2, given.answer)
    ways: dict[str, dict[str, Any]] = {
        "dropped": {},
        "kept": {"keep_reasoning": True},
        "full": {"evict": False, "recall": None},
    }
    chats = {
        name: Chat(open_model(given, n_ctx=given.ctx, **way), grammar) for name, way in ways.items()
    }
    waits: dict[str, list[float]] = {name: [] for name in chats}
    for name in interleaved(list(chats), given.turns):
        chat, turn = chats[name], len(waits[name])
        first, last, n_read = chat.ask(QUESTIONS[turn % len(QUESTIONS)], turn)
        kv = chat.llm.kv
        waits[name].append(first)
        print(
            f"turn {turn + 1}, {name}: {n_read} tokens read, first text after {first:.2f} s, "
            f"whole answer after {last:.1f} s; {kv.position} positions, {kv.used} cells used, "
            f"{kv.dropped} dropped, {kv.bytes_total / 2**20:.0f} MiB, "
            f"archive {kv.bytes_archive / 2**20:.1f} MiB",
            flush=True,
        )
    for name, seconds in waits.items():
        print(f"{name}: first text after {statistics.median(seconds[1:]):.2f} s from turn 2 on")
    compare(chats["dropped"].llm.text, given)


if __name__ == "__main__":
    run()
