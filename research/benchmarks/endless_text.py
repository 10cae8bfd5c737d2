"""Measure whether speed, memory and likelihood stay constant in a very long text.

    python -m research.benchmarks.endless_text --tokens 100000 --rows 1024

Where the model would end its text, a paragraph break is inserted, and the loop detection of `pyh2o
generate` breaks loops: the likelihood of a repetitive text says nothing. Every 1,000 tokens a line
is printed: tokens per second, resident memory, mean negative log-likelihood (NLL) of the sampled
tokens under the model's plain distribution, and the cache's counters. The last lines compare the
last 1,000 tokens with tokens 2,000 to 3,000, and the likelihood of the second half with the first.
There is no archive, which would grow, unless --recall is given. Because a machine's speed drifts in
such a long run, the text then continues for 1,000 tokens, interleaved with a new text from token
2,000 to 3,000.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyh2o.compat.llama import Llama
from pyh2o.system.memory import resident_bytes
from pyh2o.writing.repetition import RepetitionGuard
from pyh2o.writing.sampling import Sampling
from pyh2o.writing.writer import Writer
from research.eval.metrics import log_softmax, surprises

from .common import open_model, parser_of

STRETCH = 1000
BLOCK = 50
PROMPT = b"Once upon a time, in a town by the sea,"


@dataclass(frozen=True)
class Stretch:
    """The tokens up to `tokens`, since the previous stretch."""

    tokens: int
    tokens_per_second: float
    resident_bytes: int
    nll: float  # nats per token
    distinct: float  # share of distinct tokens: low in a loop
    used: int
    compactions: int
    rebases: int


def sampled_tokens(llm: Llama, sampling: Sampling) -> Iterator[int]:
    """Yield tokens without end, each while its logits are still available."""
    prompt = llm.tokenize(PROMPT)
    paragraph = llm.tokenize(b"\n\n", add_bos=False)
    guard = RepetitionGuard(prompt)

    def break_loops(
        _input_ids: npt.NDArray[np.intc], logits: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        logits[guard.forbidden] = -np.inf
        return logits

    writer = Writer(llm, sampling, logits_processor=break_loops)
    while True:
        for token in writer.write(prompt):
            if llm.text.model.is_end(token):
                break
            guard.add(token)
            yield token
        prompt = paragraph


def surprise(llm: Llama, token: int) -> float:
    """Return the negative log-likelihood of a token, in nats."""
    logits = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), (1, llm.n_vocab()))
    return float(surprises(log_softmax(logits), [token])[0])


def stretches(llm: Llama, sampling: Sampling, n_tokens: int) -> Iterator[Stretch]:
    nll: list[float] = []
    tokens: list[int] = []
    start = time.perf_counter()
    for n, token in enumerate(sampled_tokens(llm, sampling), 1):
        nll.append(surprise(llm, token))
        tokens.append(token)
        if n % STRETCH == 0:
            seconds = time.perf_counter() - start
            kv = llm.kv
            yield Stretch(
                tokens=n,
                tokens_per_second=STRETCH / seconds,
                resident_bytes=resident_bytes(),
                nll=float(np.mean(nll)),
                distinct=len(set(tokens)) / STRETCH,
                used=kv.used,
                compactions=kv.compactions,
                rebases=kv.rebases,
            )
            nll, tokens = [], []
            start = time.perf_counter()
        if n >= n_tokens:
            return


def report(found: list[Stretch]) -> None:
    early = next(stretch for stretch in found if stretch.tokens == 3 * STRETCH)
    last = found[-1]
    speed = last.tokens_per_second / early.tokens_per_second
    later = [stretch for stretch in found if stretch.tokens >= 2 * STRETCH]
    memory = [stretch.resident_bytes / 2**20 for stretch in later]
    nll = np.array([stretch.nll for stretch in later])
    halves = np.array_split(nll, 2)
    slope = np.polyfit(np.arange(nll.size), nll, 1)[0] * nll.size
    print(
        f"speed of the last {STRETCH} tokens / tokens 2,000-3,000: {speed:.3f}\n"
        f"resident memory after 2,000 tokens: {min(memory):.2f} to {max(memory):.2f} MiB\n"
        f"mean NLL: first half {halves[0].mean():.3f}, second half {halves[1].mean():.3f}, "
        f"trend over the text {slope:+.3f} (standard deviation of a stretch {nll.std():.3f})"
    )


def compare_interleaved(old: Llama, young: Llama, tokens: list[int]) -> float:
    """Return the speed of the old text divided by that of the new one, from interleaved blocks."""
    seconds = {id(old): 0.0, id(young): 0.0}
    young.eval(tokens[: 2 * STRETCH])
    for first in range(2 * STRETCH, 3 * STRETCH, BLOCK):
        for llm in (old, young):
            start = time.perf_counter()
            for token in tokens[first : first + BLOCK]:
                llm.eval([token])
            seconds[id(llm)] += time.perf_counter() - start
    return seconds[id(young)] / seconds[id(old)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.set_defaults(recall=0)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()

    llm = open_model(arguments)
    found: list[Stretch] = []
    print("tokens, tokens/s, resident MiB, NLL, distinct, cells, compactions, re-bases")
    for each in stretches(llm, Sampling(temperature=1.0, seed=arguments.seed), arguments.tokens):
        found.append(each)
        print(
            f"{each.tokens}, {each.tokens_per_second:.1f}, {each.resident_bytes / 2**20:.2f}, "
            f"{each.nll:.3f}, {each.distinct:.3f}, {each.used}, {each.compactions}, {each.rebases}",
            flush=True,
        )
    print(llm.kv.details())
    report(found)
    tokens = llm.input_ids[: 3 * STRETCH].tolist()
    ratio = compare_interleaved(llm, open_model(arguments), tokens)
    print(f"interleaved: speed of this text / a new one at tokens 2,000-3,000: {ratio:.3f}")


if __name__ == "__main__":
    main()
